"""What is taken for true, and what is not: the emulated driver's word, forms that are wrong, runs that are not whole.

In: rows and programs, made here. Out: unittest's verdict. Needs no GPU.
"""

import contextlib
import gzip
import io
import json
import os
import random
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import decisions
import diagnosis
import keep
import machine
import merge
import programs
import smoke
from parts import Part, Parts
from report import Report, table_of_speeds
from sessions import Ended, Work

RIGHT = {f"cadre_{it}_{dim}": "right" for it in ("forward", "backward") for dim in (64, 128)}


def timed(form: str, seconds: float, **more: object) -> dict:
    row = {"case": "64:8 d128, causal 16384 rows", "direction": "backward", "order": "fixed", "blocks": 132}
    row |= {"l2": "warm", "form": form, "seconds": seconds, "spread": 0.01, "tflops": 1 / seconds}
    return row | {"provenance": {"commit": "aaa", "device": "H200"}} | more


def checked(form: str, passed: bool, what: str = "dQ") -> dict:
    return {"check": f"form {form}, backward d128", "what": what, "error": 0.0, "passed": passed}


def compared(rows: list[dict]) -> dict:
    """A report whose forms are right."""
    checks = [{"check": f"form {it}, backward d128", "passed": True} for it in ("as built", "poll")]
    return {"forms": rows, "checks": checks, "kernels": {}}


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.printed = self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.report = Report(self.out / "gpu-check.json", seed=1)


class EmulatedTest(Folder):
    def said(self, device: str) -> str:
        """What the diagnosis makes of a probe that has asked `device`."""
        (self.out / "emulated").mkdir()
        lines = [{"facts": {"device": device}}, {"value": "9", "check": "it"}]
        text = "\n".join(map(json.dumps, lines))
        probe = self.out / "cadre-gpu-probe"
        # The file is the word behind --lines.
        script = f'#!/bin/sh\nwhile [ "$1" != --lines ]; do shift; done\ncat > "$2" <<\'END\'\n{text}\nEND\n'
        probe.write_text(script)
        probe.chmod(0o755)
        wrong = {"first": "dQ:3:1:32", "ours": "9", "right": "2"}
        row = {"check": "it", "what": "dQ", "error": 1.0, "passed": False, "kernel": "cadre_backward_64"}
        self.report.content["checks"].append(row | {"wrong": wrong})
        self.report.content["kernels"]["cadre_backward_64"] = "wrong"
        with mock.patch.object(diagnosis, "HERE", self.out), mock.patch.object(diagnosis.pack, "HERE", self.out):
            closer = diagnosis.Diagnosis(
                self.report, Parts(self.report, self.out, []), self.out, lambda: dict(os.environ)
            )
            return "\n".join(closer.wrong("cadre_backward_64", float("inf")))

    def test_the_word_of_another_gpu_is_not_that_of_the_emulated_one(self) -> None:
        said = self.said("NVIDIA H200")
        self.assertIn("the emulated driver could not be asked: NVIDIA H200 answered", said)
        self.assertNotIn("the kernel's source is", said)

    def test_the_emulated_gpu_is_believed(self) -> None:
        self.assertIn("the emulated GPU has 9 there: it is wrong there, too", self.said("emulated"))


class DecisionsTest(unittest.TestCase):
    def test_a_form_is_beside_the_one_that_is_built(self) -> None:
        rows = [timed("as built", 2.0), timed("as built", 1.0, order="arrival"), timed("poll", 1.5)]
        rows += [timed("as built", 2.005, blocks=128), timed("poll", 9.0, l2="cold")]
        text = "\n".join(decisions.told(compared(rows)))
        self.assertIn("dQ in one order instead of that of arrival", text)
        self.assertRegex(text, r"2000\.000 ms .* beside 1000\.000, 2\.000 times: slower")
        self.assertRegex(text, r"polled relaxed.*1500\.000 ms .* beside 2000\.000, 0\.750 times: FASTER")
        self.assertRegex(text, r"4 processors fewer.*undecided, the spread is 2\.0%")
        self.assertEqual(decisions.told(compared([])), [])

    def test_what_a_form_does_not_change_is_not_told(self) -> None:
        rows = [timed("as built", 2.0, order=it) for it in ("", "arrival", "fixed")]
        rows += [timed("poll", 1.0, order=it) for it in ("", "arrival")]
        self.assertNotIn("polled", "\n".join(decisions.told(compared(rows))))

    def test_a_form_of_forward_is_beside_forward(self) -> None:
        of = {"case": "128:8 d64, causal 16384 rows", "direction": "forward", "order": ""}
        rows = [timed("as built", 2.0, **of), timed("tall", 1.5, **of)]
        checks = [{"check": f"form {it}, forward d64", "passed": True} for it in ("as built", "tall")]
        told = decisions.told({"forms": rows, "checks": checks, "kernels": {}})
        self.assertRegex("\n".join(told), r"192 rows.* d64, .*1500\.000 ms .* beside 2000\.000, 0\.750 times: FASTER")
        checks[1]["passed"] = False
        told = decisions.told({"forms": rows, "checks": checks, "kernels": {}})
        self.assertIn("form tall of d64 is wrong: its times decide nothing", told)

    def test_what_took_turns_decides_by_the_differences_of_its_rounds(self) -> None:
        def told(ours: list[float], theirs: list[float]) -> str:
            row = timed("poll", sorted(ours)[2], spread=0.5, rounds=ours, base_rounds=theirs)
            return "\n".join(decisions.told(compared([timed("as built", 9.0), row])))

        # A GPU that slows down slows both down.
        found = told([1.0, 1.2, 1.4, 1.6, 1.8], [1.1, 1.32, 1.54, 1.76, 1.98])
        self.assertRegex(found, r"beside 1540\.000, 0\.909 times in 5 rounds: FASTER")
        # Less than 1 % is nothing that another run would find again.
        self.assertIn("undecided, less than 1 %", told([1.0] * 5, [1.005] * 5))
        found = told([1.0, 1.1, 1.0, 1.2, 0.9], [1.1, 1.0, 1.2, 1.0, 1.0])
        self.assertRegex(found, r"undecided, the spread is \d+\.\d%")

    def test_orders_of_one_form_took_turns_too(self) -> None:
        rows = [timed("as built", 2.0, order=it, rounds=[at] * 5) for it, at in (("fixed", 3.0), ("arrival", 2.0))]
        self.assertIn("1.500 times in 5 rounds: slower", "\n".join(decisions.told(compared(rows))))
        rows = [it | {"rounds": it["rounds"][:3]} for it in rows]
        self.assertIn("1.500 times in 3 rounds: undecided, too few", "\n".join(decisions.told(compared(rows))))

    def test_noise_decides_nothing(self) -> None:
        draw, decided = random.Random(5), []
        for _ in range(2000):
            ours, theirs = ([draw.gauss(1.0, 0.03) for _ in range(5)] for _ in range(2))
            row = timed("poll", 1.0, rounds=ours, base_rounds=theirs)
            words = "\n".join(decisions.told(compared([timed("as built", 1.0), row])))
            decided.append("undecided" not in words)
        # One of six would be so by the quarters of five rounds.
        self.assertLess(sum(decided), 40)
        # What is there is found all the same.
        ours, theirs = ([draw.gauss(mean, 0.005) for _ in range(5)] for mean in (0.95, 1.0))
        row = timed("poll", 1.0, rounds=ours, base_rounds=theirs)
        self.assertIn("FASTER", "\n".join(decisions.told(compared([timed("as built", 1.0), row]))))


class ClocksTest(Folder):
    def beside(self, kind: type, printed: str, uuid: str) -> dict:
        """What a nvidia-smi that prints so is taken to say."""
        tool = self.out / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
        tool.chmod(0o755)
        with mock.patch.object(machine, "tool", lambda _: str(tool)):
            it = kind(self.out / "printed", lambda: uuid)
        it.process.wait()
        return it.now()

    def test_of_several_gpus_that_which_is_used_is_asked(self) -> None:
        card = "NVIDIA H200, 580.65.06, 700.00, 1980, 143771, 0, 0, Default, GPU-1\n"
        card += "NVIDIA H200, 580.65.06, 350.00, 1980, 143771, 0, 0, Default, GPU-2"
        found = self.beside(machine.Card, card, "2")
        self.assertEqual((found["power_limit_w"], found["driver"]), ("350.00", "580.65.06"))
        found = self.beside(machine.Card, card, "")
        self.assertEqual(found, {"clocks": "unknown: there are 2 GPUs, and it is not known which is used"})
        clocks = "345, 2619, 70.1, 30, 0x1, GPU-1\n1980, 2619, 600.1, 60, 0x0, GPU-2\n345, 2619, 70.2, 30, 0x1, GPU-1"
        self.assertEqual(self.beside(machine.Clocks, clocks, "GPU-2")["sm_mhz"], "1980")
        self.assertEqual(self.beside(machine.Clocks, clocks, ""), {})

    def test_what_holds_clocks_down_is_known_where_nvidia_smi_tells(self) -> None:
        clocks = "1300, 2619, 699.1, 60, 0x0000000000000004, GPU-1"
        found = self.beside(machine.Clocks, clocks, "GPU-1")
        self.assertEqual((found["sm_mhz"], found["clock_reasons"]), ("1300", "0x0000000000000004"))

    def test_an_nvidia_smi_that_knows_no_reasons_is_asked_for_clocks_alone(self) -> None:
        tool = self.out / "nvidia-smi"
        tool.write_text(
            '#!/bin/sh\ncase "$1" in *reasons*) echo "Field is not a valid field to query."; exit 2;; esac\n'
            # As its help has them.
            'case "$3" in --loop-ms=[0-9]*) echo "1300, 2619, 699.1, 60, GPU-1" ;; esac\n'
        )
        tool.chmod(0o755)
        with mock.patch.object(machine, "tool", lambda _: str(tool)):
            it = machine.Clocks(self.out / "printed", lambda: "GPU-1")
            it.process.wait()
            self.assertEqual(it.now(), {})
            it.process.wait()
            self.assertEqual(list(it.now().items())[0::3], [("sm_mhz", "1300"), ("celsius", "60")])

    def test_the_summary_says_what_held_clocks_down(self) -> None:
        for mhz, reasons in (("1980", "0x1"), ("1410", "0x4"), ("1200", "0x24"), ("[N/A]", "[N/A]")):
            row = {"case": "64:8 d128, it", "provenance": {"sm_mhz": mhz, "clock_reasons": reasons}}
            self.report.content["forms"].append(timed("as built", 1.0) | row)
        self.report.content["max_sm_mhz"] = "1980"
        self.report.table()
        words = "clocks while timed: 1200 to 1980 MHz of 1980, held down by heat and its power limit in 2 of 3 rows"
        self.assertIn(words, self.printed.getvalue())

    def test_a_gpu_that_is_alone_is_the_one_that_is_used(self) -> None:
        clocks = "345, 2619, 70.1, 30, 0x1, GPU-1\n1980, 2619, 600.1, 60, 0x0, GPU-1"
        self.assertEqual(self.beside(machine.Clocks, clocks, "")["sm_mhz"], "1980")
        card = "NVIDIA H200, 580.65.06, 700.00, 1980, 143771, 0, 0, Exclusive_Process, GPU-1"
        found = self.beside(machine.Card, card, "")
        self.assertEqual((found["power_limit_w"], found["compute_mode"]), ("700.00", "Exclusive_Process"))


class FormsTest(unittest.TestCase):
    def content(self, *checks: dict, kernels: dict | None = None) -> dict:
        forms = [timed("as built", 2.0), timed("poll", 1.0)]
        known = RIGHT if kernels is None else kernels
        return {"commit": "aaa", "speeds": [], "forms": forms, "checks": list(checks), "kernels": known}

    def taken(self, content: dict) -> set[str]:
        return {it["form"] for it in merge.merged({}, content)["rows"]}

    def test_a_form_that_is_wrong_decides_nothing_and_is_not_merged(self) -> None:
        content = self.content(checked("as built", True), checked("poll", True), checked("poll", False, "dK"))
        told = "\n".join(decisions.told(content))
        self.assertNotIn("FASTER", told)
        self.assertIn("form poll of d128 is wrong: its times decide nothing", told)
        self.assertEqual(self.taken(content), {"as built"})

    def test_a_form_that_nobody_has_compared_decides_nothing(self) -> None:
        content = self.content(checked("as built", True))
        told = "\n".join(decisions.told(content))
        self.assertNotIn("FASTER", told)
        self.assertIn("form poll of d128 was not compared with f64", told)
        self.assertEqual(self.taken(content), {"as built"})

    def test_a_form_that_is_right_decides(self) -> None:
        content = self.content(checked("as built", True), checked("poll", True))
        self.assertIn("FASTER", "\n".join(decisions.told(content)))
        self.assertEqual(self.taken(content), {"as built", "poll"})

    def test_times_of_the_build_need_a_kernel_that_is_right(self) -> None:
        # The smoke test's, where no form was compared.
        bad = RIGHT | {"cadre_backward_128": "wrong"}
        self.assertEqual(self.taken(self.content()), {"as built"})
        self.assertEqual(self.taken(self.content(kernels=bad)), set())
        self.assertEqual(self.taken(self.content(checked("as built", False))), set())


class LaunchedTest(Folder):
    """No later stage launches a kernel that hangs or faults."""

    def launched(self, **kernels: str) -> tuple[set[str], set[str]]:
        """Names of programs that tests, training and calibration start; of those that are not run."""
        self.report.content |= {"kernels": {f"cadre_{key}": it for key, it in kernels.items()}, "not_run": []}
        started: set[str] = set()

        def start(works: object, *_: object) -> list:
            started.update(it.name for it in works)
            return []

        of = programs.Programs(self.report, self.out, self.out, 1.0)
        runs = mock.patch.object(programs.end_to_end, "check", lambda *_: started.add("training runs") or [])
        with mock.patch.object(programs.sessions, "run", start), runs:
            of.tests(1, 9)
            of.training(True, 9)
            of.calibrate(9)
        return started, {it["name"] for it in self.report.content["not_run"]}

    def test_what_hangs_in_copies_or_parts_is_not_launched_again(self) -> None:
        for kernel in ("copy_rows_16", "copy_rows_4", "merge"):
            started, left = self.launched(**{kernel: "hang"})
            self.assertNotIn("rows between two processes", started, kernel)
            self.assertNotIn("training runs", started, kernel)
            self.assertLessEqual({"rows between two processes", "training runs"}, left, kernel)
        # Of a head dim that no training run has.
        self.assertIn("training runs", self.launched(forward_64_softcap="hang", forward_128="fault")[0])

    def timed(self, kernels: str = "", **broken: str) -> tuple[str, set[str]]:
        """Kernels whose forms are timed; what is not run."""
        self.report.content |= {"kernels": {f"cadre_{key}": it for key, it in broken.items()}, "not_run": []}
        asked: list[str] = []
        parts = mock.MagicMock()
        parts.run = lambda those, *_: asked.extend(those[0].words)
        of = smoke.Smoke(self.report, parts, dict)
        of.kernels = kernels
        of.forms(9)
        words = dict(zip(asked[::2], asked[1::2], strict=True))
        return words.get("--kernels", ""), {it["name"] for it in self.report.content["not_run"]}

    def test_forms_of_a_head_dim_are_timed_whatever_another_does(self) -> None:
        of = {dim: f"cadre_backward_{dim}" for dim in (128, 64, 256)}
        self.assertEqual(self.timed(), (",".join(of.values()), set()))
        self.assertEqual(self.timed(backward_256_softcap="hang", sink="fault"), (",".join(of.values()), set()))
        self.assertEqual(self.timed(forward_64="hang"), (f"{of[128]},{of[256]}", {"decisions between forms, d64"}))
        self.assertEqual(self.timed(of[64], backward_128="fault"), (of[64], set()))
        # Who ends dQ does so for all.
        timed, left = self.timed(finish_dq="fault")
        self.assertEqual((timed, len(left)), ("", 3))

    def test_a_calibration_needs_kernels_that_are_right(self) -> None:
        right = {"forward_128": "right", "backward_128": "right"}
        self.assertIn("cadre calibrate", self.launched(**right)[0])
        for bad in ({}, right | {"backward_128": "wrong"}, right | {"forward_128": "fault"}):
            started, left = self.launched(**bad)
            self.assertEqual(("cadre calibrate" in started, "cadre calibrate" in left), (False, True), bad)


class RefusedTest(Folder):
    def test_there_is_no_gpu_though_the_pack_has_a_failure(self) -> None:
        self.report.check("pack", "a wheel cannot be unpacked", False)
        it = Part("smoke", refused="there is no GPU 0")
        self.assertFalse(Parts(self.report, self.out, []).over(it, Ended(Work("smoke", [], 1), 3, "exit 3")))
        self.assertEqual(self.report.content.get("refused"), "there is no GPU 0")
        self.assertEqual(len(self.report.content["checks"]), 1)


class KeepTest(Folder):
    def archived(self) -> dict[str, bytes]:
        self.assertEqual(keep.archive(self.out / "work", self.out), "")
        with tarfile.open(self.out / "logs.tar.gz") as pack:
            return {it: pack.extractfile(it).read() for it in pack.getnames()}

    def test_what_a_program_wrote_comes_back_whole_or_not_at_all(self) -> None:
        (self.out / "work").mkdir()
        core, noise = bytes(range(256)) * (keep.ONE // 64), os.urandom(keep.LARGEST + 1)
        for name, content in (("it.core", core), ("it.given", core), ("large.core", noise), ("it.log", core)):
            (self.out / "work" / name).write_bytes(content)
        found = self.archived()
        self.assertEqual({gzip.decompress(found[it]) == core for it in ("it.core.gz", "it.given.gz")}, {True})
        self.assertNotIn("large.core.gz", found)
        self.assertIn("large.core", found["left-out.txt"].decode())
        self.assertLess(len(found["it.log"]), keep.ONE + 100)
        self.assertLess((self.out / "logs.tar.gz").stat().st_size, keep.LARGEST)
        self.assertTrue(keep.fits(self.out / "work" / "it.core"))
        self.assertFalse(keep.fits(self.out / "work" / "large.core"))

    def test_the_archive_stays_below_what_comes_back(self) -> None:
        (self.out / "work").mkdir()
        for index in range(4):
            (self.out / "work" / f"{index}.core").write_bytes(os.urandom(keep.LARGEST // 3))
        found = self.archived()
        self.assertEqual(sum(it.endswith(".core.gz") for it in found), 2)
        self.assertEqual(found["left-out.txt"].decode().count(".core"), 2)
        self.assertLess((self.out / "logs.tar.gz").stat().st_size, keep.LARGEST)


class VerdictTest(Folder):
    def test_a_run_that_only_lacked_time_has_a_code_of_its_own(self) -> None:
        self.report.check("it", "is", True)
        self.assertEqual(self.report.verdict(), 0)
        self.report.leave_out("profile")
        self.assertEqual((self.report.verdict(), self.report.passed()), (4, False))
        self.report.content["stopped"] = "stopped by SIGTERM"
        self.assertEqual(self.report.verdict(), 1)
        del self.report.content["stopped"]
        self.report.check("it", "is", False)
        self.assertEqual(self.report.verdict(), 1)


class SpeedsTest(unittest.TestCase):
    def test_a_ratio_within_the_spread_is_marked_and_so_is_the_hosts_work(self) -> None:
        row = timed("", 1.0, kernel="Cadre", ratio=1.1, ratio_spread=0.2)
        row |= {"ratio_deterministic": 2.0, "ratio_deterministic_spread": 0.01}
        _, line, words = table_of_speeds([row])
        self.assertRegex(line, r" ~1\.10 +2\.00$")
        self.assertIn("~: by less than the spread of both times", words)
        _, line, words = table_of_speeds([row | {"ratio_spread": 0.01, "without_host": False}])
        self.assertRegex(line, r" 1\.10 +2\.00 h$")
        self.assertIn("h: with the host's work between runs", words)
        self.assertEqual(len(table_of_speeds([row | {"ratio_spread": 0.01}])), 2)
        content = {"commit": "aaa", "speeds": [row], "forms": [], "checks": [], "kernels": RIGHT}
        self.assertIn("| ~1.10 ", merge.render(merge.merged({}, content)))


if __name__ == "__main__":
    unittest.main()
