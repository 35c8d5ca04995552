"""What is made of odd machines: a Python that trusts no folder, a GPU that one process may use, one that others use, no
cuBLASLt.

In: programs and facts, made here. Out: unittest's verdict. Needs no GPU.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import end_to_end
import programs
import run
from report import Report
from sessions import Ended

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
        self.assertNotIn("rows between two processes", started)
        for name in ("rows between two processes", "training runs"):
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


if __name__ == "__main__":
    unittest.main()
