"""The whole call where nothing ends by itself: it is over within its budget, whatever hangs, and says what was cut;
and calls that end before they have begun.

In: run.py as it is packed; programs, a PyTorch and tools that hang, hear no signal, or tell something without end,
written here. Out: unittest's verdict. Time is played: every wait of run.py is half a second of it, however long it
takes, so nothing is judged by the speed of this machine. What run.py does between its waits costs nothing here.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = {"gpu-check.json", "calibration.json", "trace.json", "logs.tar.gz"}
# Characters of the end of what is printed that come back, and seconds that a call has.
SEEN, CALL = 12_000, 560
STAGES = (
    *("smoke: every kernel once", "diagnosis", "kernels against PyTorch", "tests of the Rust face"),
    *("decisions between forms", "bench, early batches", "tensors of PyTorch", "training runs"),
    *("cadre calibrate", "bench, the rest", "sanitizers", "profile"),
)
# run.py with a clock that its own waits move; where a probe talks, by half a second a line of it.
CALLER = """
import os, signal, subprocess, sys, time

passes, now, alarm, heard = time.sleep, 0.0, 0.0, {}

def sleep(seconds):
    global now, alarm, heard
    passes(0.0002)
    # Not where subprocess waits, nor for the death of what was killed.
    if seconds != sessions.TICK or any(it.killed_at and sessions.members(it.process.pid) for it in sessions.RUNNING):
        return
    talking = [it for it in sessions.RUNNING if it.work.command[0] == os.environ["TALKS"] and not it.killed_at]
    told = {id(it): it.offset for it in talking if "--form" not in it.work.command}
    if any(offset == heard.get(it, 0) for it, offset in told.items()):
        return
    heard = told
    now += 0.5
    if 0 < alarm <= now:
        alarm = 0.0
        os.kill(os.getpid(), signal.SIGALRM)

def setitimer(which, seconds):
    global alarm
    alarm = now + seconds if seconds else 0.0

time.sleep, time.monotonic, signal.setitimer = sleep, lambda: now, setitimer
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
import run, sessions
code = run.main()
print(f"over at {now} s", flush=True)
os._exit(code)
"""
HANGS = "#!/bin/sh\ntrap '' TERM INT HUP\nread word < {pipe}\n"
# A probe whose kernels are right, and that then tells places without end.
ENDLESS = """#!{python} -SE
import json, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(words["--lines"], "a", buffering=1) as lines:
    tell = lambda line: lines.write(json.dumps(line) + "\\n")
    tell({{"begun": 0, "name": "unit 0"}})
    for kernel in ("cadre_forward_128", "cadre_backward_128"):
        row = {{"check": "it", "what": "O", "error": 0, "passed": True, "kernel": kernel}}
        tell({{"to": "checks", "row": row}})
    while True:
        tell({{"at": "the next place"}})
        time.sleep(0.002)
"""
# One whose kernels hang, each of those that are not done, and then hang in the form that tells where, too.
BROKEN = """#!{python} -SE
import json, os, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--form" in words:
    os.execv("/bin/sh", ["/bin/sh", "{hangs}"])
done = {{int(it) for it in words.get("--done", "").split(",") if it}}
unit = min(set(range(24)) - done)
with open(words["--lines"], "a") as lines:
    lines.write(json.dumps({{"begun": unit, "name": f"unit {{unit}}", "kernel": f"cadre_kernel_{{unit}}"}}) + "\\n")
sys.exit(6)
"""


class Pack(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.pack, self.out, self.pipe = folder / "pack", folder / "out", folder / "pipe"
        os.mkfifo(self.pipe)
        self.pack.mkdir()
        for path in [*HERE.glob("*.py"), HERE / "job.yaml"]:
            shutil.copy(path, self.pack)
        shutil.copytree(HERE / "workloads", self.pack / "workloads")


class Whole(Pack):
    def call(self, probe: str = "") -> tuple[str, dict]:
        folder, pack, out, pipe = self.folder, self.pack, self.out, self.pipe
        packages = folder / "packages"
        (pack / "pack.json").write_text('{"commit": "played"}')
        (pack / "forms" / "watch").mkdir(parents=True)
        hangs = HANGS.format(pipe=pipe)
        programs = {f"pack/{it}": hangs for it in ("cadre", "device-tests", "exchange-tests")}
        programs |= {f"tools/{it}": hangs for it in ("nvidia-smi", "compute-sanitizer", "cuda-gdb", "ncu")}
        programs["pack/cadre-gpu-probe"] = probe.format(python=sys.executable, hangs=pack / "cadre") or hangs
        # This torch stands still while it is imported.
        programs["packages/torch/__init__.py"] = f"open({str(pipe)!r})\n"
        programs["packages/torch-2.11.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
        for name, text in programs.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        environment = {"PATH": f"{folder / 'tools'}:/nowhere", "PYTHONPATH": str(packages), "TMPDIR": str(folder)}
        environment["TALKS"] = str(pack / "cadre-gpu-probe") if probe else "nobody"
        command = [sys.executable, "-S", "-B", "-c", CALLER, str(pack / "run.py"), "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        *_, last = done.stdout.splitlines()
        seconds = float(re.fullmatch(r"over at (\S+) s", last)[1])
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertLessEqual(seconds, CALL, done.stdout)
        self.assertLessEqual({it.name for it in out.iterdir()}, NAMES)
        self.assertIn("\nsummary: ", done.stdout[-SEEN:])
        # Nothing it had begun is left, nor what it wrote meanwhile.
        self.assertEqual([it.name for it in folder.glob("cadre-gpu-check-*")], [])
        return done.stdout, json.loads((out / "gpu-check.json").read_text())

    def begun(self, printed: str) -> list[str]:
        return [it for it in STAGES if re.search(rf"s\] {re.escape(it)}, \d+ s at most", printed)]

    def test_every_program_hangs(self) -> None:
        printed, content = self.call()
        self.assertEqual(self.begun(printed), list(STAGES))
        self.assertIn("FAILED part smoke: nothing new for 30 s, killed", printed[-SEEN:])
        self.assertEqual(content["kernels"], {})

    def test_nothing_hangs_and_nothing_ends(self) -> None:
        printed, content = self.call(ENDLESS)
        self.assertEqual(self.begun(printed), list(STAGES))
        # What is cut is said, of every stage that has something to do.
        cut = (
            "smoke, rest, at: the next place",
            "copies of rows",
            "Rust face, forward, rest",
            "bench early",
            "bench d64 full",
        )
        cut += (
            "forms, rest, at: the next place",
            "cadre run, GPU, two trainers in place, 8 steps",
            "memcheck, forward, rest",
        )
        cut += ("cadre calibrate, rest", "profile of cadre_forward_128, rest", "profile of cadre_backward_128")
        self.assertLessEqual(set(cut), set(content["left_out"]))

    def test_every_kernel_hangs_and_so_does_its_diagnosis(self) -> None:
        printed, content = self.call(BROKEN)
        self.assertEqual(self.begun(printed), list(STAGES))
        self.assertEqual(set(content["kernels"].values()), {"hang"})
        last = printed[printed.rindex("\nsummary: ") :]
        self.assertEqual(last.count("FAILED part smoke: a launch does not end"), 1, last)
        self.assertIn("  so do: cadre_kernel_1, ", last)
        self.assertIn("DIAGNOSIS cadre_kernel_0: hangs, but not so in the form that tells", printed[-SEEN:])


class Early(Pack):
    def start(self, *words: str) -> subprocess.Popen:
        command = [sys.executable, "-S", "-B", str(self.pack / "run.py"), *words]
        environment = {"PATH": "/nowhere", "TMPDIR": str(self.folder)}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder, env=environment
        )

    def test_whoever_ends_it_while_it_looks_at_the_pack_is_told(self) -> None:
        (self.pack / "pack.json").write_text('{"commit": "played", "files": {"../pipe": [1, "a"]}}')
        process = self.start("--out", str(self.out))
        # Open as soon as somebody reads: from then on it waits for a byte of its own pack.
        with self.pipe.open("wb"):
            self.assertEqual(json.loads((self.out / "gpu-check.json").read_text())["checks"], [])
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate()
        self.assertEqual((process.returncode, printed.splitlines()[-1]), (1, "stopped by SIGTERM"))
        content = json.loads((self.out / "gpu-check.json").read_text())
        self.assertEqual((content["stopped"], content["left_out"]), ("stopped by SIGTERM", list(STAGES)))
        self.assertEqual([it.name for it in self.folder.glob("cadre-gpu-check-*")], [])

    def test_words_that_name_nothing_are_refused(self) -> None:
        for words, code, said in (
            (("--out", ""), 2, "argument --out: names no folder"),
            (("--table", "nothing.json"), 1, "error: nothing.json is no gpu-check.json of a run: "),
            (("--out", "out", "--only", "nothing"), 1, "FAILED stages: none begins with nothing: smoke: every kernel"),
        ):
            process = self.start(*words)
            printed, _ = process.communicate()
            self.assertEqual(process.returncode, code, printed)
            self.assertIn(said, printed)
            self.assertNotIn("Traceback", printed)


if __name__ == "__main__":
    unittest.main()
