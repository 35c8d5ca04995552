"""What is made of odd machines: a Python that trusts no folder, a GPU that one process may use or that others use,
several GPUs, no cuBLASLt; and of a calibration that is cut.

In: programs and facts, made here. Out: unittest's verdict. Needs no GPU.
"""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import end_to_end
import machine
import parts
import programs
import run
from parts import Part, Parts
from report import Report
from sessions import Ended, Work

HERE = Path(__file__).resolve().parent


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.printed = self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.report = Report(self.out / "gpu-check.json", seed=1)
        self.programs = programs.Programs(self.report, self.out, self.out, 1.0)

    def left(self) -> dict[str, str]:
        return {it["name"]: it["why"] for it in self.report.content["not_run"]}


class PythonTest(unittest.TestCase):
    def test_a_python_that_trusts_no_folder_finds_the_pack(self) -> None:
        command = [sys.executable, "-B", str(HERE / "run.py"), "--table", "/nowhere/gpu-check.json"]
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        self.assertIn("is no gpu-check.json of a run", done.stdout, done.stderr)


class OtherPythonTest(unittest.TestCase):
    def started(self, *words: str, **environment: str) -> str:
        """What run.py prints by this Python beside one that says it has PyTorch."""
        with tempfile.TemporaryDirectory() as folder:
            other = Path(folder) / "python3"
            other.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "by the other: $2 $3"\n')
            other.chmod(0o755)
            command = [
                sys.executable,
                *words,
                "-B",
                str(HERE / "run.py"),
                "--out",
                f"{folder}/out",
                "--only",
                "nothing",
            ]
            known = {"PATH": folder, "TMPDIR": folder, **environment}
            return subprocess.run(command, capture_output=True, text=True, check=False, env=known).stdout

    @unittest.skipIf(importlib.util.find_spec("torch"), "this Python has PyTorch")
    def test_a_python_that_has_torch_goes_on(self) -> None:
        said = self.started().splitlines()
        self.assertRegex(said[0], r"python\S* has no PyTorch, /\S+/python3 has: it goes on with that")
        self.assertRegex(said[1], r"^by the other: --out /\S+/out$")
        # Once; and not where somebody wants no packages.
        for words, environment in (([], {machine.AGAIN: "1"}), (["-S"], {})):
            self.assertNotIn("the other", self.started(*words, **environment))


class SearchTest(Folder):
    def test_the_search_for_pytorch_has_an_end(self) -> None:
        pipe = self.out / "pipe"
        os.mkfifo(pipe)
        for folder in ("a", "b"):
            (self.out / folder).mkdir()
            (self.out / folder / "python3").write_text(f"#!/bin/sh\nread word < {pipe}\n")
            (self.out / folder / "python3").chmod(0o755)
        path = f"{self.out / 'a'}:{self.out / 'b'}"
        waited: list[float] = []
        real = subprocess.run

        def asked(command: list[str], timeout: float = 0.0, **how: object) -> object:
            waited.append(timeout)
            return real(command, timeout=min(timeout, 0.01), **how)

        with (
            mock.patch.dict(os.environ, {"PATH": path}),
            mock.patch.multiple(machine, PYTHONS=(), ASKED_S=5.0),
            mock.patch.object(machine.subprocess, "run", asked),
        ):
            self.assertIsNone(machine.python_with_torch())
        self.assertEqual(len(waited), 2)
        self.assertTrue(all(it <= 5.0 for it in waited) and waited[1] < waited[0], waited)


class ExclusiveTest(Folder):
    def widths(self, mode: str) -> list[int]:
        """Of the checks and of the tests."""
        self.report.content |= {"compute_mode": mode, "torch": "2.11.0"}
        parts, of = mock.MagicMock(), mock.MagicMock()
        smoke = mock.MagicMock(kernels="")
        plan = run.Plan(self.report, parts, of, smoke, mock.MagicMock(), dry=False)
        plan.checks(9)
        plan.tests(9)
        return [parts.run.call_args.args[1], of.tests.call_args.args[0]]

    def test_a_gpu_that_one_process_may_use_has_one_at_a_time(self) -> None:
        self.assertEqual(self.widths("Exclusive_Process"), [1, 1])
        self.assertEqual(self.widths("Default"), [6, 4])

    def test_what_needs_several_processes_is_not_run_there(self) -> None:
        self.report.content["compute_mode"] = "Exclusive_Process"
        started: set[str] = set()
        start = lambda works, *_: started.update(it.name for it in works) or iter(())  # noqa: E731
        with mock.patch.object(programs.sessions, "run", start):
            self.programs.tests(1, 9)
            self.programs.training(True, 9)
            self.programs.tensors(True, 9)
        self.assertNotIn("rows between two processes", started)
        for name in ("rows between two processes", "training runs", "tensors of PyTorch"):
            self.assertIn("compute mode EXCLUSIVE_PROCESS", self.left()[name])

    def test_a_gpu_that_others_use_is_a_note(self) -> None:
        for used, percent, said in (("40000", "0", True), ("0", "80", True), ("512", "0", False)):
            self.report.content |= {"notes": [], "memory_used_mib": used, "busy_percent": percent}
            run.Plan(self.report, *[mock.MagicMock()] * 4, dry=False).first(9)
            self.assertEqual(any("others use this GPU" in it for it in self.report.content["notes"]), said, used)


class GainTest(unittest.TestCase):
    def test_a_gain_is_of_medians_and_has_a_spread(self) -> None:
        local = [9.0, 1.20, 1.21, 1.20, 1.19, 1.20, 1.20, 1.21]
        shared = [8.0, 1.00, 1.01, 1.00, 0.99, 1.00, 1.00, 1.01]
        found = end_to_end.gain(local, shared)
        self.assertIn("1.000 s a step, local 1.200", found)
        self.assertRegex(found, r"gain 1\.20 \(medians of 8 steps, spread \d\.\d%\)$")
        self.assertIn("undecided", end_to_end.gain(local, [it + 0.005 for it in local]))

    def test_the_runs_that_are_compared_are_longer(self) -> None:
        asked: dict[str, int] = {}

        class Runs:
            steps = 4

            def run(self, name: str, _end: float, *_words: object, steps: int = 0) -> dict:
                asked[name] = steps
                seconds = [2.0 if name == end_to_end.LOCAL else 1.0] * steps
                return {"name": name, "bits": ["0x3f800000"] * steps, "seconds": seconds, "on_gpu": True}

        rows = list(end_to_end.check(Runs(), 9))
        self.assertEqual((asked[end_to_end.LOCAL], asked[end_to_end.SHARED], asked[end_to_end.NODE]), (8, 8, 4))
        self.assertRegex(rows[-1]["note"], r"gain 2\.00 \(medians of 8 steps")


class LibraryTest(Folder):
    SAID = "error: this machine has no cuBLASLt (libcublasLt.so), which a trainer's linear layers need on the GPU"

    def test_linear_layers_are_not_run_without_cublaslt(self) -> None:
        def start(works: object, *_: object) -> list[Ended]:
            return [Ended(it, 101, "exit 101", self.SAID) for it in works if "linear" in it.name]

        with mock.patch.object(programs.sessions, "run", start):
            self.programs.tests(1, 9)
        self.assertEqual(self.left(), {"Rust face, linear::products": "cuBLASLt is missing"})
        row = {"check": "cadre run, it", "what": "exit 1", "error": 1.0, "passed": False, "tail": self.SAID}
        with mock.patch.object(programs.end_to_end, "check", lambda *_: [row]):
            self.programs.training(True, 9)
        self.assertEqual(self.left()["cadre run, it"], "cuBLASLt is missing")
        self.assertEqual(self.report.content["checks"], [])


class DriverTest(Folder):
    def test_a_driver_that_is_on_the_search_path_is_hidden_by_no_other(self) -> None:
        # Any library will do: nothing of it is called.
        maps = Path("/proc/self/maps").read_text().split()
        library = Path(next(it for it in maps if re.search(r"/lib(c|m)[.-][^/]*so[^/]*$", it)))
        for name in ("machine", "compat"):
            (self.out / name).mkdir()
            shutil.copy(library, self.out / name / "libplayed.so.1")
        folder = str(self.out / "machine")
        with mock.patch.multiple(machine, LIBRARY="libplayed.so.1", DRIVERS=(folder,)):
            self.assertIn(folder, machine.libraries())
            with mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": str(self.out / "compat")}):
                self.assertNotIn(folder, machine.libraries())


class TensorsTest(Folder):
    CADRE = """#!/bin/sh
for word in "$@"; do case $last in --out) to=$word ;; -f) job=$word ;; esac; last=$word; done
mkdir -p "$to/logs"
echo "rank 0: results of the GPU's rows have the bits of the host" > "$to/logs/0.log"
grep -q bubble_rank "$job" && MEASURES && echo "bubble: 1.00 ms" >> "$to/logs/0.log"
grep -q '"inPlace": true' "$job" || cp "$to/logs/0.log" "$to/logs/1.log"
"""

    def test_each_rank_has_to_say_that_its_tensors_were_compared(self) -> None:
        self.programs.tensors(True, time.monotonic() + 60)
        self.assertEqual(self.left(), {"tensors of PyTorch": "the pack has no package cadre that can be unpacked"})
        self.report.content |= {"kernels": {"cadre_backward_64": "hang"}, "not_run": []}
        self.programs.tensors(True, time.monotonic() + 60)
        self.assertEqual(self.left(), {"tensors of PyTorch": "cadre_backward_64 hang or fault"})
        self.report.content |= {"kernels": {}, "not_run": []}
        self.programs.packages = self.out
        (self.out / "cadre").mkdir()
        program = self.out / "program"
        program.touch(0o755)
        (self.out / "local_gpu.py").write_text("print('the same on both')")
        for bubble in ("it measured nothing", "1.00 ms"):
            self.report.content["checks"] = []
            text = self.CADRE.replace("MEASURES", "true" if "ms" in bubble else "false")
            program.write_text(text)
            with mock.patch.dict(programs.pack.COPIES, {"cadre": program}):
                self.programs.tensors(True, time.monotonic() + 60)
            found = {it["check"]: (it["passed"], it["what"]) for it in self.report.content["checks"]}
            right = [True, False, False, True, "ms" in bubble]
            self.assertEqual([it[0] for it in found.values()], right, found)
            self.assertIn("1 of 2 compared", found["tensors of PyTorch, attention in place"][1])
            self.assertIn(bubble, found["tensors of PyTorch, a layer in place"][1])


class CalibrationTest(Folder):
    CADRE = """#!/bin/sh
for word in "$@"; do case $word in --out=*) to=${word#--out=} ;; esac; done
echo '{"partial": "3 of 8 rows of its tables are measured"}' > "$to"
echo '{' > "${to%%/*}/.calibration.json.new"
read word < %s
echo '{"version": 1}' > "$to"
"""

    def calibrated(self, ends: bool) -> list[str]:
        """Notes of a stage whose time is over as soon as a part of the calibration is there; or where all comes."""
        out, pipe = self.out / "out", self.out / "pipe"
        out.mkdir()
        os.mkfifo(pipe)
        (self.out / "cadre").write_text(self.CADRE % ("/dev/null" if ends else pipe))
        (self.out / "cadre").chmod(0o755)
        self.report.content["kernels"] = {"cadre_forward_128": "right", "cadre_backward_128": "right"}
        of = programs.Programs(self.report, self.out / "logs", out, 1.0)

        class Clock:
            begin = time.monotonic()
            sleep = staticmethod(time.sleep)

            @staticmethod
            def monotonic() -> float:
                there = not ends and programs.partial(out / "calibration.json")
                return time.monotonic() + (30.0 if there else 0.0)

        with mock.patch.object(programs.pack, "HERE", self.out), mock.patch.object(programs.sessions, "time", Clock):
            of.calibrate(Clock.begin + 20)
        self.assertEqual([it.name for it in out.iterdir()], ["calibration.json"])
        return self.report.content["notes"]

    def test_what_was_measured_of_one_that_is_cut_comes_back(self) -> None:
        self.assertEqual(
            self.calibrated(ends=False),
            ["calibration.json is partial: 3 of 8 rows of its tables are measured; what it has is kept"],
        )
        self.assertEqual(self.report.content["left_out"], ["cadre calibrate, rest"])
        self.assertEqual(self.report.content["checks"], [])

    def test_one_that_is_whole_is_no_note(self) -> None:
        self.assertEqual(self.calibrated(ends=True), [])
        self.assertEqual([it["passed"] for it in self.report.content["checks"]], [True])


class ProfileTest(Folder):
    # As ncu 2025.3 prints a section.
    NCU = """#!/bin/sh
cat <<'END'
==PROF== Connected to process 71
  cadre_forward_128 (132, 1, 1)x(384, 1, 1), Context 1, Stream 13, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    Memory Throughput                 %        41.52
    Duration                         ms         3.07
    Compute (SM) Throughput           %        78.20
    ----------------------- ----------- ------------
    Section: Scheduler Statistics
    No Eligible                      %        63.71
    Issued Warp Per Scheduler                  0.36
    Registers Per Thread             register/thread             168
END
"""

    def profiled(self, text: str) -> None:
        tool = self.out / "ncu"
        tool.write_text(text)
        tool.chmod(0o755)
        self.report.content["kernels"] = {"cadre_forward_128": "right"}
        with mock.patch.object(programs.machine, "tool", lambda _: str(tool)):
            self.programs.profile(time.monotonic() + 60)

    def test_counters_are_told_with_their_units(self) -> None:
        self.profiled(self.NCU)
        (note,) = self.report.content["notes"]
        for words in (
            "cadre_forward_128 by ncu: Duration 3.07 ms, Compute (SM) Throughput 78.20 %, Memory Throughput 41.52 %",
            "Issued Warp Per Scheduler 0.36, No Eligible 63.71 %, Registers Per Thread 168 register/thread",
        ):
            self.assertIn(words, note)
        self.assertEqual(self.left(), {"profile of cadre_backward_128": "it is not right"})

    def test_a_profiler_that_gets_no_counters_is_no_failure(self) -> None:
        self.profiled("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1\n")
        self.assertIn("ncu gave no counters (exit 1)", self.left()["profile of cadre_forward_128"])
        self.assertEqual(self.report.content["checks"], [])


class OneGpuTest(Folder):
    def told(self, *uuids: str) -> list[dict]:
        """Failed rows where processes tell that they have these GPUs."""
        of = Parts(self.report, self.out, [])
        for index, uuid in enumerate(uuids):
            of.heard(Part(f"part {index}"), {"facts": {"device": "H200", "uuid": uuid}})
        return self.report.failed()

    def test_rows_name_the_gpu_that_the_driver_has(self) -> None:
        self.assertEqual(self.told("GPU-1", "GPU-1"), [])
        self.assertEqual(self.report.origin()["uuid"], "GPU-1")

    def test_another_gpu_in_a_later_process_is_a_failure(self) -> None:
        rows = self.told("GPU-1", "GPU-2", "GPU-2")
        self.assertEqual({it["cause"] for it in rows}, {"another GPU"})
        self.assertIn("part 1 has GPU GPU-2, the first stage had GPU-1", rows[0]["what"])
        self.assertEqual(self.report.content["uuid"], "GPU-1")

    def test_a_pytorch_with_another_gpu_is_told_once_and_launches_nothing(self) -> None:
        said = "PyTorch has GPU 2, the driver's first is GPU-1: set CUDA_VISIBLE_DEVICES to one"
        of = Parts(self.report, self.out, [])
        for name in ("d128 forward", "d64 forward"):
            ended = Ended(Work(name, [], 1), parts.OTHER_GPU, "exit 8", f"words\n{said}\n")
            self.assertFalse(of.over(Part(name, kernel="cadre_forward_128"), ended))
        told = "\n".join(self.report.failures())
        self.assertIn(f"FAILED part d128 forward: {said} (and 1 more rows of this cause)", told)
        self.assertFalse(any("kernel" in it for it in self.report.failed()))


if __name__ == "__main__":
    unittest.main()
