"""What the report, its summary, causes, decisions and the merge into the tree promise. Needs no GPU and starts nothing.

In: rows, made here. Out: unittest's verdict.
"""

import contextlib
import io
import json
import math
import resource
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import causes
import keep
import merge
import programs
import run
import sessions
from report import SUMMARY, Report, fit
from sessions import Ended, Work

KERNELS = [f"{it}_{dim}" for it in ("forward", "backward") for dim in (64, 128)]
RIGHT = {f"cadre_{it}": "right" for it in (*KERNELS, "copy_rows_16", "copy_rows_4")}
# Characters of the end of what is printed that come back.
SEEN = 12_000


def failed(check: str, what: str = "dQ", **more: object) -> dict:
    return {"check": check, "what": what, "error": 0.5, "passed": False, **more}


def timed(form: str, seconds: float, **more: object) -> dict:
    row = {
        "case": "64:8 d128, causal 16384 rows",
        "direction": "backward",
        "order": "fixed",
        "blocks": 132,
        "l2": "warm",
    }
    return row | {"form": form, "seconds": seconds, "spread": 0.01, "tflops": 1 / seconds} | more


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.printed = self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.report = Report(self.out / "gpu-check.json", seed=1)


class SummaryTest(Folder):
    def test_it_fits_and_ends_with_the_failures_whatever_there_is(self) -> None:
        for index in range(400):
            # As many causes: digits alone tell none from another.
            name = f"check {'abcdefghij'[index % 10] * 40}{'abcdefghij'[index // 10 % 10]}"
            self.report.content["checks"].append(failed(f"{name} {index}", "w" * 500))
        for index in range(300):
            row = {
                "kernel": "Cadre",
                "direction": "forward",
                "share_of_matmul": 0.5,
                "case": f"case {index}",
                **timed("", 1.0),
            }
            self.report.content["speeds"].append(row | {"case": f"case {index}"})
            self.report.content["forms"].append(timed("as built", 1.0, case=f" d128, {index}", direction="forward"))
            self.report.content["left_out"].append("left out " * 20)
            self.report.content["not_run"].append({"name": f"part {index}", "why": "y" * 300})
        self.report.content["kernels"]["cadre_forward_128"] = "right"
        self.report.table()
        printed = self.printed.getvalue()
        self.assertLess(len(printed), SEEN)
        self.assertGreater(len(printed), SUMMARY // 2)
        self.assertEqual(printed.strip().splitlines()[-1], "checks: 400, failed: 400")
        # Of each part something is there.
        for words in (
            "summary:",
            "decisions between forms",
            "case 0",
            "not run: part 0",
            "FAILED check a",
            "more lines",
        ):
            self.assertIn(words, printed)

    def test_what_does_not_fit_keeps_its_beginning_and_its_end(self) -> None:
        lines = [f"line {it}" for it in range(1000)]
        kept = fit(lines, 500)
        self.assertEqual((kept[0], kept[-1]), ("line 0", "line 999"))
        self.assertLessEqual(sum(len(it) + 1 for it in kept), 500)
        dropped = next(it for it in kept if "more lines" in it)
        self.assertEqual(int(dropped.split()[1]), 1000 - len(kept) + 1)
        self.assertEqual(fit(lines[:3], 500), lines[:3])

    def test_every_row_says_where_it_is_from(self) -> None:
        self.report.content |= {"commit": "abc", "driver": "580", "cubins": "forward 12", "torch": "2.11.0"}
        self.report.clocks = lambda: {"sm_mhz": "1980", "power_w": "600"}
        self.report.check("it", "is", True)
        for to in ("speeds", "forms", "rates"):
            self.report.add(to, {"case": "it"})
        for name in ("checks", "speeds", "forms", "rates"):
            origin = self.report.content[name][0]["provenance"]
            self.assertEqual((origin["commit"], origin["driver"], origin["sm_mhz"]), ("abc", "580", "1980"), name)

    def test_a_full_folder_costs_the_file_and_not_the_run(self) -> None:
        self.report.check("first", "is", True)
        self.report.store()
        kept = (self.out / "gpu-check.json").read_text()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            # Files take no more than this; the system says so as it does of a disk that is full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept), limits[1]))
            for index in range(20):
                self.report.check(f"another {index}", "is", True)
            self.report.store()
            self.report.table()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        # What was there stays whole, and nothing is beside it.
        self.assertEqual(json.loads((self.out / "gpu-check.json").read_text())["checks"][0]["check"], "first")
        self.assertEqual([it.name for it in self.out.iterdir()], ["gpu-check.json"])
        self.assertIn("gpu-check.json is not whole: File too large", self.printed.getvalue())
        self.assertFalse(self.report.passed())
        self.report.store()
        self.assertEqual(len(json.loads((self.out / "gpu-check.json").read_text())["checks"]), 21)


class CausesTest(unittest.TestCase):
    def test_a_common_cause_is_told_once(self) -> None:
        rows = [failed(f"part {it}", "this Python has no torch", cause="no torch") for it in range(9)]
        rows += [failed("Rust face, forward", f"exit 101, {it} s") for it in (3, 4)]
        lines = causes.told(rows, {})
        self.assertEqual(len([it for it in lines if it.startswith("FAILED")]), 2)
        self.assertIn("(and 8 more rows of this cause)", lines[0])
        self.assertIn("(and 1 more rows of this cause)", lines[1])

    def test_kernels_that_end_alike_are_named_in_one_line(self) -> None:
        def ends(kernel: str, how: str) -> dict:
            what = f"a launch does not end, at: {kernel}; last row: none"
            return failed("part smoke", what, kernel=f"cadre_{kernel}", how=how)

        lines = causes.told([ends("forward_64", "hang"), ends("merge", "hang"), ends("sink", "fault")], {})
        self.assertIn("at: forward_64; last row: none, 5.00e-01 (and 1 more rows of this cause)", lines[0])
        self.assertEqual(lines[1], "  so do: cadre_merge")
        self.assertEqual((len(lines), "at: sink" in lines[2]), (3, True))

    def test_wrong_numbers_name_element_tile_and_operands(self) -> None:
        wrong = {"first": "dQ:3:1:32", "ours": "1", "right": "2", "count": "9 of 99", "rows": "3", "heads": "1"}
        wrong |= {"columns": "32-63", "tile": "row 3, tile of rows 0, warpgroup 1", "operands": {"Q of the row": [1.0]}}
        row = failed("backward d64", kernel="cadre_backward_64", wrong=wrong)
        text = "\n".join(causes.told([row], {}))
        for words in (
            "first wrong: dQ:3:1:32: 1, right is 2",
            "columns 32-63",
            "warpgroup 1",
            "Q of the row [1.0]",
            "panels",
        ):
            self.assertIn(words, text)
        # Where dK is wrong, too, it is not the operand of dQ.
        other = failed("backward d64", "dK", kernel="cadre_backward_64")
        self.assertNotIn("panels", "\n".join(causes.told([row, other], {})))

    def test_one_diagnosis_of_several_kernels_is_told_once(self) -> None:
        def waits(block: int, what: str) -> list[str]:
            return [
                f"hangs: block {block}, thread 96 waits too long",
                f"12 warps wait for {what}: block {block} warp 3",
            ]

        found = {"cadre_forward_64": waits(0, "k_full"), "cadre_forward_128": waits(2, "k_full")}
        lines = causes.told([], {"diagnosis": found | {"cadre_merge": waits(0, "turn")}})
        self.assertEqual(
            [it for it in lines if it.startswith("DIAGNOSIS")],
            [
                "DIAGNOSIS cadre_forward_64: hangs: block 0, thread 96 waits too long",
                "DIAGNOSIS cadre_merge: hangs: block 0, thread 96 waits too long",
            ],
        )
        self.assertEqual(lines[2], "  the same but for numbers: cadre_forward_128")


class SanitizersTest(Folder):
    def rows(self, printed: str, code: int) -> dict[str, bool]:
        """What the stage makes of a sanitizer that prints and ends so."""
        tool = self.out / "sanitizer"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
        tool.chmod(0o755)
        with mock.patch.object(programs.machine, "tool", lambda _: str(tool)):
            programs.Programs(self.report, self.out / "work", self.out, 1.0).sanitizers(math.inf)
        return {it["check"]: it["passed"] for it in self.report.content["checks"]}

    def test_one_that_refuses_the_gpu_is_no_failure(self) -> None:
        rows = self.rows("========= Error: Device not supported\n========= ERROR SUMMARY: 1 error", 1)
        self.assertEqual((rows, len(self.report.content["not_run"])), ({}, 2 * len(programs.SANITIZED)))

    def test_what_memcheck_finds_decides_and_what_racecheck_finds_does_not(self) -> None:
        found = "========= Invalid __global__ write of size 4 bytes\n=========     at cadre_forward_64+0x10"
        rows = self.rows(f"{found}\ntest result: FAILED.\n========= ERROR SUMMARY: 1 error", 9)
        self.assertEqual({it.split(",")[0]: ok for it, ok in rows.items()}, {"memcheck": False, "racecheck": True})

    def test_reads_of_shared_memory_alone_decide_nothing_where_results_are_right(self) -> None:
        found = "========= Invalid __shared__ read of size 16 bytes\n=========     at cadre_forward_64+0x10"
        self.assertEqual(set(self.rows(f"{found}\ntest result: ok.", 9).values()), {True})


class KeepTest(Folder):
    def test_logs_are_one_archive_of_bounded_size(self) -> None:
        work = self.out / "work"
        (work / "parts").mkdir(parents=True)
        (work / "parts" / "small.log").write_text("small")
        (work / "large.log").write_bytes(b"begin" + bytes(3 * keep.ONE) + b"end")
        self.assertEqual(keep.archive(work, self.out), "")
        with tarfile.open(self.out / "logs.tar.gz") as pack:
            self.assertEqual(sorted(pack.getnames()), ["large.log", "parts/small.log"])
            large = pack.extractfile("large.log").read()
        self.assertTrue(large.startswith(b"begin") and large.endswith(b"end"))
        self.assertLess(len(large), keep.ONE + 100)
        self.assertEqual(sorted(it.name for it in self.out.iterdir()), ["logs.tar.gz", "work"])


class BudgetTest(Folder):
    def test_budgets_fit_into_the_call(self) -> None:
        nobody = mock.MagicMock()
        stages = run.Plan(self.report, nobody, nobody, nobody, nobody, dry=False).stages()
        # The end, the moment after which it stops whatever it does, and the death of what it started.
        with mock.patch.object(sys, "argv", ["run.py"]):
            seconds = run.arguments().seconds
        self.assertLessEqual(sum(it.budget for it in stages), seconds)
        self.assertLessEqual(seconds + run.GRACE + sessions.DYING, 560)
        names = [it.name.split(":")[0].split(",")[0] for it in stages]
        order = [
            "smoke",
            "diagnosis",
            "kernels against PyTorch",
            "decisions between forms",
            "bench",
            "training runs",
            "sanitizers",
        ]
        self.assertEqual([it for it in names if it in order and it != "bench"], [it for it in order if it != "bench"])
        self.assertLessEqual(next(it.budget for it in stages if it.name.startswith("smoke")), 30)

    def test_a_stage_that_uses_all_its_time_leaves_the_others_theirs(self) -> None:
        ends = []
        stages = [run.Stage(str(it), 10 * (it + 1), ends.append) for it in range(3)]
        run.go(stages, self.report, 120)
        self.assertAlmostEqual(ends[1] - ends[0], 20, delta=0.5)
        self.assertAlmostEqual(ends[2] - ends[0], 110, delta=0.5)


class PartsOfKernelsTest(unittest.TestCase):
    def test_parts_name_the_kernels_that_they_launch(self) -> None:
        for part, kernels in [
            ("d64 backward", ("cadre_backward_64",)),
            ("d128 softcap forward", ("cadre_forward_128_softcap",)),
            ("d256 sinks and bits", ("cadre_forward_256", "cadre_backward_256")),
            ("bench d64 causal", ("cadre_forward_64", "cadre_backward_64")),
            ("bench early", ("cadre_forward_128", "cadre_backward_128")),
            ("copies of rows", ("cadre_copy_rows_16", "cadre_copy_rows_4")),
        ]:
            self.assertEqual(run.kernels_of(part), kernels, part)

    def test_a_child_that_says_nothing_is_taken_to_hang(self) -> None:
        from parts import HANGS, how

        work = Work("it", [], 1)
        self.assertEqual(how(Ended(work, -9, "nothing new for 15 s, killed")), "hang")
        self.assertEqual(how(Ended(work, HANGS, "exit 6")), "hang")
        self.assertEqual(how(Ended(work, -11, "killed by signal 11 (SIGSEGV)")), "fault")


class MergeTest(unittest.TestCase):
    def content(self, commit: str, seconds: float, **more: object) -> dict:
        row = timed(
            "", seconds, kernel="Cadre", ratio=1.25, ratio_peer="FA3", provenance={"commit": commit, "device": "H200"}
        )
        other = row | {"case": "64:8 d64, causal 16K x1"}
        return {"commit": commit, "speeds": [row, other], "forms": [], "checks": [], "kernels": dict(RIGHT), **more}

    def test_newer_rows_take_the_place_of_older_ones_and_others_name_their_commit(self) -> None:
        store = merge.merged({}, self.content("aaa", 2.0))
        later = self.content("bbb", 1.0)
        del later["speeds"][1]
        store = merge.merged(store, later)
        self.assertEqual(len(store["rows"]), 2)
        text = merge.render(store)
        self.assertIn("Commit `bbb`; device H200", text)
        self.assertRegex(text, r"d128, causal 16384 rows .* 1000\.000 .* \|  \|")
        self.assertRegex(text, r"d64, causal 16K x1 .* 2000\.000 .* commit `aaa` \|")

    def test_a_bar_takes_numbers_of_the_newest_commit_and_of_one_run(self) -> None:
        def run(commit: str, peers: tuple[str, ...], rows: int, seconds: float) -> dict:
            content = self.content(commit, seconds)
            row = content["speeds"][0] | {"case": f"64:8 d128, causal {rows}K x1", "direction": "forward", "ratio": 0.9}
            content["speeds"] = [row, *(row | {"kernel": it, "seconds": 1.0} for it in peers)]
            return content

        def bar(store: dict) -> str:
            return next(it for it in merge.render(store).splitlines() if it.startswith("| dense causal"))

        store = merge.merged({}, run("aaa", ("cuDNN",), 16, 2.0))
        self.assertIn("| 0.50 / not measured |", bar(store))
        # Without cuDNN, its time of another run is none to compare with.
        store = merge.merged(store, run("bbb", (), 16, 1.0))
        self.assertIn("| not measured / not measured |", bar(store))
        # A case that only the older commit has measured is in no bar of the newer one.
        store = merge.merged({}, run("aaa", ("cuDNN",), 32, 2.0))
        store = merge.merged(store, run("bbb", ("cuDNN",), 16, 1.0))
        self.assertIn("| 1.00 / not measured |", bar(store))
        store = merge.merged(store, run("ccc", ("FA3",), 16, 1.0))
        self.assertIn("| 0.50 (another commit) / not measured |", bar(store))

    def test_copies_of_rows_have_a_table(self) -> None:
        rate = {"case": "one piece", "gigabytes": 2000.4, "ratio": 0.5, "provenance": {"commit": "aaa"}}
        wrong = self.content("ccc", 1.0, rates=[rate], kernels=RIGHT | {"cadre_copy_rows_16": "wrong"})
        store = merge.merged({}, self.content("aaa", 1.0, rates=[rate]))
        store = merge.merged(store, self.content("bbb", 1.0))
        self.assertIn("| one piece | 2000 | 0.50 | commit `aaa`, unknown GPU |", merge.render(store))
        self.assertEqual(merge.merged({}, wrong)["rates"], [])

    def test_what_says_nothing_of_a_gpu_is_refused(self) -> None:
        for more in ({"dry": True}, {"dirty": "with changes that are not committed"}, {"commit": "unknown"}):
            with self.assertRaises(merge.RefusedError):
                merge.merged({}, self.content("aaa", 1.0) | more)

    def test_rows_of_another_gpu_stay_and_name_it(self) -> None:
        store = merge.merged({}, self.content("aaa", 2.0))
        later = self.content("aaa", 1.0)
        for row in later["speeds"]:
            row["provenance"] = {"commit": "aaa", "device": "H100"}
        text = merge.render(merge.merged(store, later))
        self.assertIn("measured on H100 |", text)
        self.assertRegex(text, r"d64, causal 16K x1 .* 2000\.000 .*\| H200 \|")
        self.assertRegex(text, r"d64, causal 16K x1 .* 1000\.000 .*\|  \|")

    def test_times_of_wrong_kernels_are_not_taken(self) -> None:
        content = self.content("aaa", 1.0, kernels=RIGHT | {"cadre_backward_64": "wrong"})
        self.assertEqual([it["case"] for it in merge.merged({}, content)["rows"]], ["64:8 d128, causal 16384 rows"])

    def test_the_page_and_the_calibration_are_what_is_recorded(self) -> None:
        if not (merge.ROOT / merge.PAGE).exists():
            self.skipTest("a pack has no pages")
        store_path = merge.ROOT / merge.STORE
        store = json.loads(store_path.read_text()) if store_path.exists() else {}
        page = (merge.ROOT / merge.PAGE).read_text()
        self.assertEqual(page, merge.into_page(page, merge.render(store)))
        self.assertEqual((merge.ROOT / merge.TABLES).read_text(), merge.tables(store.get("calibrations", {})))


if __name__ == "__main__":
    unittest.main()
