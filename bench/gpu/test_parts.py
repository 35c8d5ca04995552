"""What the machinery of run.py promises about programs that hang, die, flood or leave others behind. Needs no GPU.

In: children that do so, written here. Out: unittest's verdict. Nothing is judged by how long it takes: what hangs waits
for a signal that never comes, and time jumps as soon as the children have got where they should.
"""

import contextlib
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import causes
import run
import sessions
import smoke
from parts import Part, Parts
from report import Report
from run import Stage
from sessions import Work

HERE = Path(__file__).resolve().parent

# In the place of run.py: what it does is its part's name. Units: a row each, trouble in the second of three.
CHILD = """
import json, os, signal, subprocess, sys

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
lines = open(words["--lines"], "a", buffering=1)
done, broken = ({int(it) for it in words.get(key, "").split(",") if it} for key in ("--done", "--broken"))
print("here is", words["--part"], flush=True)
if words["--part"] == "blind":
    print("PyTorch 2.11.0 sees no GPU: it was built for CUDA None", flush=True)
    sys.exit(3)
if words["--part"].startswith("unborn"):
    raise ImportError("libcudart.so.13: cannot open shared object file")
for unit in sorted({0, 1, 2} - done, key=lambda it: it in broken):
    lines.write(json.dumps({"begun": unit, "name": f"unit {unit}"}) + "\\n")
    if unit == 1:
        lines.write(json.dumps({"at": "the launch", "peers": words["--part"] == "peer dies"}) + "\\n")
        lines.write('{"to": "checks", "row": {"che')
        lines.flush()
        match words["--part"]:
            case "is refused":
                lines.write("\\n" + json.dumps({"refused": "the driver gives no GPU"}) + "\\n")
                sys.exit(3)
            case "hangs" | "forms":
                signal.pause()
            case "stubborn":
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                signal.pause()
            case "no room":
                sys.exit(7)
            case "dies otherwise":
                os.kill(os.getpid(), 40)
            case "dies" | "peer dies" if unit not in broken:
                os.kill(os.getpid(), signal.SIGSEGV)
            case "floods":
                for _ in range(64):
                    sys.stdout.write("flood\\n" * 100000)
                print("the last words", flush=True)
            case "leaves":
                # Two hold the pipe: one of its group, one of another.
                wait = [sys.executable, "-c", "import signal; signal.pause()"]
                for group in (None, 0):
                    it = subprocess.Popen(wait, process_group=group)
                    lines.write("\\n" + json.dumps({"facts": {f"left {group}": it.pid}}))
        lines.write("\\n")
    row = {"check": words["--part"], "what": f"unit {unit}", "error": 0, "passed": True}
    lines.write(json.dumps({"to": "checks", "row": row}) + "\\n" + json.dumps({"done": unit}) + "\\n")
"""


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX"


DAY = 24 * 3600.0


def part(name: str, limit: float = math.inf, silence: float = math.inf, again: int = 2) -> Part:
    return Part(name, limit, silence, again)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.out = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.printed = self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.report = Report(self.out / "gpu-check.json")
        self.parts = Parts(self.report, self.out, [])
        child = self.out / "child.py"
        child.write_text(CHILD)
        self.parts.program = [sys.executable, str(child)]
        self.seen: set[tuple] = set()
        self.awaited: set[tuple] = set()
        real, self.jumped = time.monotonic, 0.0
        self.enterContext(mock.patch.object(time, "monotonic", lambda: real() + self.jumped))
        self.enterContext(mock.patch.object(self.parts, "heard", self.heard))

    def heard(self, part: Part, line: dict) -> None:
        """Lets a day go by when all that is awaited has been seen."""
        Parts.heard(self.parts, part, line)
        self.seen |= {(part.name, line[key]) for key in ("at", "done") if key in line}
        if self.awaited and self.awaited <= self.seen:
            self.jumped, self.awaited = self.jumped + DAY, set()

    def go(self, *parts: Part) -> dict[str, list[str]]:
        """Runs parts at once; units that have rows, of each."""
        self.parts.run(parts, len(parts), math.inf)
        rows = self.report.content["checks"]
        return {part.name: [it["what"] for it in rows if it["check"] == part.name] for part in parts}

    def failed(self) -> list[dict]:
        return [it for it in self.report.content["checks"] if not it["passed"]]


class PartsTest(Case):
    def test_a_gpu_that_is_refused_later_is_a_failure_and_not_none(self) -> None:
        self.go(part("is refused", again=0))
        (row,) = self.failed()
        self.assertIn("the driver gives no GPU, at: the launch", row["what"])
        self.assertNotIn("refused", self.report.content)

    def test_one_that_hangs_is_killed_and_goes_on_behind_the_unit(self) -> None:
        self.awaited = {("works", 2), ("hangs", "the launch"), ("works too", 2)}
        rows = self.go(part("works"), part("hangs", silence=1000), part("works too"))
        self.assertEqual(rows["works"], rows["works too"])
        self.assertEqual(rows["hangs"], ["unit 0", "unit 2"])
        (row,) = self.failed()
        self.assertEqual(row["check"], "part hangs")
        self.assertEqual(row["what"], "nothing new for 1000 s, killed, at: the launch; last row: hangs: unit 0")
        self.assertIn("here is hangs", row["tail"])

    def test_one_that_hears_no_signal_is_killed_all_the_same(self) -> None:
        self.awaited = {("stubborn", "the launch")}
        self.go(part("stubborn", limit=1000, again=0))
        self.assertIn("killed, at: the launch", self.failed()[0]["what"])
        self.assertEqual(sessions.RUNNING, [])

    def test_one_that_takes_too_long_is_killed_and_is_not_begun_forever(self) -> None:
        self.awaited = {("hangs", "the launch")}
        rows = self.go(part("hangs", limit=1000, again=0))
        self.assertEqual(rows["hangs"], ["unit 0"])
        self.assertRegex(self.failed()[0]["what"], r"no end after 864\d\d s, killed")
        self.assertEqual(sessions.RUNNING, [])

    def test_one_that_dies_names_the_signal(self) -> None:
        self.assertEqual(self.go(part("dies"), part("works"))["dies"], ["unit 0", "unit 2"])
        (row,) = self.failed()
        self.assertRegex(row["what"], r"killed by signal 11 \(SIGSEGV\), at: the launch; last row: dies: unit 0")

    def test_what_a_peer_may_have_ended_comes_once_more_and_last(self) -> None:
        self.assertEqual(self.go(part("peer dies"))["peer dies"], ["unit 0", "unit 2", "unit 1"])
        self.assertEqual(len(self.failed()), 1)

    def test_one_that_floods_is_read_to_its_end_and_kept_in_part(self) -> None:
        self.assertEqual(self.go(part("floods"))["floods"], ["unit 0", "unit 1", "unit 2"])
        log = (self.out / "parts" / "floods-1.log").read_bytes()
        self.assertLess(len(log), sessions.LOGGED + 2 * sessions.KEPT)
        self.assertTrue(log.endswith(b"the last words\n"))

    def test_a_disk_that_takes_no_log_costs_the_log_alone(self) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            # Of a file; the system says so as it does of a disk that is full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            rows = self.go(part("floods"), part("works"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertEqual(rows["floods"], ["unit 0", "unit 1", "unit 2"])
        self.assertEqual((rows["works"], self.failed()), (rows["floods"], []))

    def test_one_that_cannot_tell_anything_is_no_kernel_that_faults(self) -> None:
        it = part("no room", again=0)
        it.of = "cadre_forward_64"
        self.go(it)
        (row,) = self.failed()
        self.assertRegex(row["what"], "the disk that takes what it tells is full")
        self.assertNotIn("kernel", row)

    def test_what_a_part_leaves_behind_dies_with_it(self) -> None:
        self.assertEqual(self.go(part("leaves"))["leaves"], ["unit 0", "unit 1", "unit 2"])
        for which in ("left None", "left 0"):
            pid = self.report.content[which]
            while alive(pid):
                os.sched_yield()

    def test_parts_that_cannot_begin_say_why_once(self) -> None:
        self.go(part("unborn"), part("unborn too"))
        (line,) = [it for it in causes.told(self.failed(), self.report.content) if it.startswith("FAILED")]
        self.assertRegex(line, r"it cannot begin: ImportError: libcudart.so.13: cannot .* \(and 1 more rows of this")

    def test_a_signal_without_a_name_is_told_by_its_number(self) -> None:
        self.go(part("dies otherwise", again=0))
        self.assertIn("killed by signal 40 (of no name)", self.failed()[0]["what"])

    def test_one_that_cannot_be_started_is_a_row(self) -> None:
        self.parts.program = [str(self.out / "no such program")]
        self.go(part("works"))
        self.assertRegex(self.failed()[0]["what"], "could not be started")


class BlameTest(Case):
    """Which kernel a part's end is laid to."""

    def kernels(self, name: str, **more: object) -> dict[str, str]:
        it = part(name, silence=1000, again=more.pop("again", 0))
        it.of = "cadre_backward_64"
        for key, value in more.items():
            setattr(it, key, value)
        self.awaited = {(name, "the launch")}
        self.go(it)
        smoke.Smoke(self.report, self.parts, dict).judge()
        return {key: how for key, how in self.report.content["kernels"].items() if how != "right"}

    def test_a_kernel_that_was_launched_is_to_blame(self) -> None:
        self.assertEqual(self.kernels("hangs"), {"cadre_backward_64": "hang"})
        (row,) = self.failed()
        self.assertEqual((row["part"], row["unit"]), ("hangs", 1))

    def test_no_kernel_is_to_blame_for_a_framework_without_a_gpu(self) -> None:
        self.assertEqual(self.kernels("blind"), {})
        self.assertEqual(self.failed()[0]["what"], "PyTorch 2.11.0 sees no GPU: it was built for CUDA None")

    def test_no_kernel_is_to_blame_for_a_peer(self) -> None:
        self.assertEqual(self.kernels("peer dies", again=1), {})

    def test_a_kernel_as_it_is_built_is_not_to_blame_for_another_form(self) -> None:
        self.assertEqual(self.kernels("forms"), {})
        self.assertIn("the launch", self.failed()[0]["what"])


class WholeTest(Case):
    def test_the_end_leaves_out_what_runs_and_what_waits(self) -> None:
        def both(end: float) -> None:
            self.parts.run([part("works"), part("hangs"), part("never")], 1, end)

        self.awaited = {("hangs", "the launch")}
        run.go([Stage("both", 500, both), Stage("after", 400, both)], self.report, 1000)
        kept = json.loads((self.out / "gpu-check.json").read_text())
        self.assertEqual(kept["left_out"], ["hangs, rest, at: the launch", "never", "after"])
        self.assertEqual([it["what"] for it in kept["checks"]], ["unit 0", "unit 1", "unit 2", "unit 0"])
        self.assertIn("checks: 4, failed: 0", self.printed.getvalue())
        self.assertIn("left out for want of time: 3", self.printed.getvalue())

    def test_a_stage_that_raises_is_a_row_and_one_that_stands_still_is_ended(self) -> None:
        def broken(_: float) -> None:
            raise ValueError("no such thing")

        def stands(_: float) -> None:
            self.assertTrue(900 < signal.setitimer(signal.ITIMER_REAL, 0.01)[0] <= 1000 + run.GRACE)
            while True:
                os.sched_yield()

        run.go(
            [Stage("broken", 300, broken), Stage("stands", 300, stands), Stage("after", 300, broken)], self.report, 1000
        )
        self.assertEqual([it["what"] for it in self.failed()], ["ValueError: no such thing"])
        self.assertEqual(self.report.content["left_out"], ["stands", "after"])
        self.assertIn("stopped by SIGALRM", self.printed.getvalue())
        self.assertFalse(self.report.passed())

    def test_two_signals_at_once_end_it_once(self) -> None:
        def both(_: float) -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, run.STOPS)
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            # Both signals come now, before anything else is done.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, run.STOPS)

        kept: list[str] = []
        run.go([Stage("both", 500, both), Stage("after", 400, both)], self.report, 1000, lambda: kept.append("logs"))
        self.assertEqual((self.report.content["left_out"], kept), (["both", "after"], ["logs"]))
        self.assertRegex(self.printed.getvalue(), r"checks: 0, failed: 0\nstopped by SIG(TERM|INT)\n$")

    def test_whoever_ends_it_finds_the_rows_and_no_child(self) -> None:
        script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import run
from parts import Part, Parts
from report import Report
out = Path({str(self.out)!r})
report = Report(out / "gpu-check.json")
parts = Parts(report, out, [])
parts.program = [sys.executable, str(out / "child.py")]
parts.run([Part("leaves")], 1, 1e18)
run.go([run.Stage("hangs", 1e3, lambda end: parts.run([Part("hangs", 1e3, 1e3)], 1, end))], report, 1e3)
"""
        program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        waits = self.out / "parts" / "hangs-1.jsonl"
        while not waits.exists() or "the launch" not in waits.read_text():
            self.assertIsNone(program.poll())
            os.sched_yield()
        program.send_signal(signal.SIGTERM)
        printed, _ = program.communicate()
        self.assertIn("checks: 4, failed: 0", printed)
        self.assertEqual(program.returncode, 0)
        self.assertEqual(
            [it for it in Path("/proc").glob("[0-9]*/cmdline") if names(it, str(self.out / "child.py"))], []
        )
        report = Report.read(self.out / "gpu-check.json")
        report.table()
        self.assertIn("left out for want of time: 1: hangs", self.printed.getvalue())


def names(cmdline: Path, word: str) -> bool:
    with contextlib.suppress(OSError):
        return word.encode() in cmdline.read_bytes()
    return False


class SessionsTest(unittest.TestCase):
    def test_an_output_of_its_own_is_kept_in_part(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            program = f"print('begin'); print('x' * {3 * sessions.PRINTED}, flush=True)"
            ended = sessions.one(Work("it", [sys.executable, "-c", program], 60, stdout=out), 1e18)
            self.assertEqual((ended.why, out.stat().st_size), ("", sessions.PRINTED))
            with out.open() as kept:
                self.assertEqual(kept.readline(), "begin\n")

    def test_output_may_be_kept_apart_from_errors(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            command = [sys.executable, "-c", "import sys; print('out'); print('error', file=sys.stderr); sys.exit(4)"]
            ended = sessions.one(Work("it", command, 60, stdout=out), 1e18)
            self.assertEqual((ended.why, ended.output, out.read_text()), ("exit 4", "error\n", "out\n"))


if __name__ == "__main__":
    unittest.main()
