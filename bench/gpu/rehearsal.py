"""What comes back from run.py when something is wrong: played over the emulated driver, with the kernels' own source
behind it.

In: CADRE_PACK, a pack with an emulated driver; CADRE_REHEARSED, which of how many parts of each module is played
(`0/1`: all). `cargo test -p cadre-gpu-check --test rehearsal` makes packs and plays this, rehearsal_larger.py and
rehearsal_blame.py. Out: unittest's verdict. What is played by the emulated driver: a lost
arrival at a barrier, an illegal address, operands read otherwise, an old driver, another GPU. Tools of the machine are
played by programs that print what the real ones do. Nothing is judged by how long it takes. CADRE_REHEARSE=all plays
what takes more than a few seconds, too.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import dataclass
from pathlib import Path

PACK = Path(os.environ.get("CADRE_PACK", "no pack"))
# Played by the soak alone.
LONG = unittest.skipUnless(os.environ.get("CADRE_REHEARSE") == "all", "takes long: make soak PARTS=rehearsal")
# Files that a run may leave.
NAMES = {"gpu-check.json", "calibration.json", "trace.json", "logs.tar.gz"}
# Characters of the end of what is printed that come back.
SEEN = 12_000
# Fast ones, of which the second is right whatever is played with the first.
BAD, GOOD = "cadre_backward_64", "cadre_forward_64"
SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "========= Invalid __global__ read of size 16 bytes"
echo "=========     at cadre_backward_64+0x1a40"
echo "=========     by thread (96,0,0) in block (2,0,0)"
echo "=========     Address 0x7f3a00000010 is out of bounds"
echo "=========     Saved host backtrace up to driver entry point at kernel launch time"
exit 9
"""
# Where the GPU is lent through a layer that it does not know.
REFUSING = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
echo "========= Error: Device not supported. Please refer to the documentation for supported devices"
echo "========= Error: process didn't terminate successfully"
echo "========= Target application returned an error"
exit 1
"""
DEBUGGER = """#!/bin/sh
echo "Opening GPU coredump: somewhere"
echo "CUDA Exception: Warp Illegal Address"
echo "The exception was triggered at PC 0x7fd0e8c3a2d0 (cadre::backward_load<64>, backward_producer.cuh:40)"
echo "[Current focus set to CUDA kernel 0, grid 12, block (2,0,0), thread (96,0,0), device 0, sm 4, warp 3, lane 0]"
"""


@dataclass
class Came:
    """What a caller gets."""

    code: int
    seen: str  # the end of what was printed
    content: dict
    files: set[str]


class Play(unittest.TestCase):
    """A run over the emulated driver."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.out = self.folder / "out"

    def tool(self, name: str, text: str) -> None:
        path = self.folder / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(
        self,
        *words: str,
        kernels: str = f"{GOOD},{BAD}",
        packages: Path | None = None,
        python: str = sys.executable,
        before: tuple[str, ...] = (),
        **plays: str,
    ) -> subprocess.Popen:
        # Without packages of the machine; with no tools but those that are played.
        path = {"PATH": f"{self.folder / 'tools'}:/nowhere", "LD_LIBRARY_PATH": str(PACK / "emulated")}
        play = {f"CADRE_EMULATED_{key}": value for key, value in plays.items()}
        other = {"PYTHONPATH": str(packages)} if packages else {}
        command = [*before, python, "-S", str(PACK / "run.py"), "--dry", "--seed", "7", "--out", str(self.out)]
        command += ["--only", "smoke,diagnosis,kernels,decisions", "--kernels", kernels, *words]
        environment = {**path, **play, **other, "TMPDIR": str(self.folder), "HOME": str(self.folder)}
        # A terminal of long ago.
        environment["PYTHONIOENCODING"] = "ascii"
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def came(self, process: subprocess.Popen) -> Came:
        printed, _ = process.communicate()
        if not self.out.is_dir():
            return Came(process.returncode, printed[-SEEN:], {}, set())
        with contextlib.suppress(OSError):
            content = json.loads((self.out / "gpu-check.json").read_text())
            return Came(process.returncode, printed[-SEEN:], content, {it.name for it in self.out.iterdir()})
        return Came(process.returncode, printed[-SEEN:], {}, {it.name for it in self.out.iterdir()})

    def play(self, *words: str, **how: str | Path) -> Came:
        came = self.came(self.start(*words, **how))
        self.assertLessEqual(came.files, NAMES)
        self.assertIn("logs.tar.gz", came.files)
        return came

    def summary(self, came: Came) -> str:
        """All of it, which is the end of what was printed, failures last."""
        self.assertIn("\nsummary: ", came.seen)
        summary = came.seen[came.seen.rindex("\nsummary: ") :]
        self.assertRegex(
            summary.strip().splitlines()[-1], r"^(checks: \d+, failed: \d+|NOTHING WAS RUN|.* is not whole)"
        )
        return summary


class Rehearsal(Play):
    @LONG
    def test_all_is_right(self) -> None:
        came = self.play(kernels="")
        kernels = came.content["kernels"]
        self.assertEqual(set(kernels.values()), {"right"}, kernels)
        # Every kernel of the build, but those that others launch with them.
        self.assertEqual(len(kernels), 12 + 5)
        self.assertIn("dQ in one order instead of that of arrival", came.seen)
        self.assertIn("processors fewer", came.seen)
        self.assertIn("turns at dQ are polled relaxed", came.seen)
        for row in [*came.content["checks"], *came.content["forms"]]:
            self.assertEqual(row["provenance"]["commit"], "rehearsed")
            # Without PyTorch, too.
            self.assertRegex(row["provenance"]["uuid"], r"^GPU-454d554c(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")

    def test_a_kernel_hangs(self) -> None:
        came = self.play(HANG=BAD)
        summary = self.summary(came)
        self.assertEqual((came.code, came.content["kernels"][BAD], came.content["kernels"][GOOD]), (1, "hang", "right"))
        self.assertRegex(summary, rf"DIAGNOSIS {BAD}: hangs: block \d, thread \d+ waits too long")
        self.assertRegex(
            summary, r"\d+ warps wait for (kv|q|dout)_(full|empty)(\[\d\])?, parity [01]: block \d warp \d"
        )
        self.assertIn("a launch does not end", summary)
        self.assertEqual(summary.count("FAILED part smoke"), 1)
        # Nobody waits for it again.
        self.assertIn(f"not run: decisions between forms, d64: {BAD}", summary)

    def test_a_kernel_faults_and_there_is_a_sanitizer(self) -> None:
        self.tool("compute-sanitizer", SANITIZER)
        summary = self.summary(self.play(FAULT=BAD))
        self.assertIn(f"DIAGNOSIS {BAD}: faults: by compute-sanitizer", summary)
        for words in ("at cadre_backward_64+0x1a40", "by thread (96,0,0) in block (2,0,0)", "0x7f3a00000010"):
            self.assertIn(words, summary)
        self.assertIn("CUDA_ERROR_ILLEGAL_ADDRESS", summary)

    def test_a_kernel_faults_and_there_is_a_debugger(self) -> None:
        self.tool("cuda-gdb", DEBUGGER)
        summary = self.summary(self.play(FAULT=BAD))
        for words in ("faults: by its core dump", "Warp Illegal Address", "PC 0x7fd0e8c3a2d0", "block (2,0,0)"):
            self.assertIn(words, summary)

    def test_a_kernel_faults_and_the_sanitizer_refuses_the_gpu(self) -> None:
        self.tool("compute-sanitizer", REFUSING)
        self.tool("cuda-gdb", DEBUGGER)
        summary = self.summary(self.play(FAULT=BAD))
        for words in ("faults: by its core dump; compute-sanitizer names no access", "PC 0x7fd0e8c3a2d0"):
            self.assertIn(words, summary)

    def test_a_kernel_faults_and_there_are_no_tools(self) -> None:
        came = self.play(FAULT=BAD)
        words = "its address is not known: compute-sanitizer and cuda-gdb are not on this machine"
        self.assertIn(words, self.summary(came))
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "fault"})

    @LONG
    def test_a_kernel_hangs_while_it_is_timed(self) -> None:
        # No check launches it, the time does.
        timed = "cadre_forward_128"
        came = self.play("--only", "smoke,diagnosis", kernels=f"{GOOD},time of d128 forward", HANG=timed)
        summary = self.summary(came)
        self.assertIn("FAILED part smoke: a launch does not end, at: time of d128 forward", summary)
        self.assertEqual(came.content["kernels"], {GOOD: "right", timed: "hang"})
        self.assertRegex(summary, rf"DIAGNOSIS {timed}: hangs: block \d, thread \d+ waits too long")

    @LONG
    def test_a_kernel_hangs_while_forms_are_timed(self) -> None:
        came = self.play("--only", "decisions", HANG=BAD)
        self.assertEqual(came.content["kernels"], {BAD: "hang"})
        self.assertRegex(self.summary(came), rf"DIAGNOSIS {BAD}: hangs: block \d, thread \d+ waits too long")

    def test_a_form_that_is_wrong_is_not_timed(self) -> None:
        came = self.play("--only", "decisions", WRONG=BAD)
        self.assertEqual(came.content["forms"], [])
        self.assertIn("form poll, backward d64: wrong: not timed", came.seen)
        self.assertEqual(came.content["kernels"], {BAD: "wrong"})

    @LONG
    def test_streams_wait_for_no_word_of_the_host(self) -> None:
        came = self.play("--only", "smoke,decisions", GATES="0")
        self.assertEqual({it["without_host"] for it in came.content["forms"]}, {False})
        self.assertIn("with the host's work between runs", self.summary(came))
        self.assertEqual(came.code, 0)

    def test_the_machine_is_older_than_the_pack(self) -> None:
        facts = json.loads((PACK / "pack.json").read_text())
        (PACK / "pack.json").write_text(json.dumps(facts | {"glibc": "9.1"}))
        self.addCleanup(lambda: (PACK / "pack.json").write_text(json.dumps(facts)))
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertRegex(
            self.summary(came), r"FAILED pack: its programs need glibc 9\.1, this machine has 2\.\d+: they"
        )

    def test_programs_have_lost_their_modes(self) -> None:
        (PACK / "cadre-gpu-probe").chmod(0o644)
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertEqual((came.code, came.content["kernels"]), (0, {GOOD: "right"}))

    def test_numbers_are_wrong_as_by_another_swizzle(self) -> None:
        came = self.play(WRONG=BAD)
        summary = self.summary(came)
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "wrong"})
        wrong = [it for it in came.content["checks"] if not it["passed"] and it.get("kernel") == BAD]
        self.assertEqual({it["what"] for it in wrong}, {"dQ"})
        self.assertEqual(wrong[0]["wrong"]["columns"], "32-63")
        self.assertRegex(summary, r"first wrong: dQ:\d+:\d+:32: \S+, right is \S+; wrong are \d+ of \d+")
        self.assertRegex(summary, r"its tile: row \d+, tile of rows \d+, warpgroup 1, warp \d, lane \d+, register \d+")
        self.assertIn("its operands: ", summary)
        self.assertIn("the form `panels` avoids it", summary)
        self.assertRegex(
            summary, r"the emulated GPU has \S+ there: the kernel's source is right as we read the hardware"
        )

    @LONG
    def test_numbers_are_wrong_as_by_a_product(self) -> None:
        came = self.play(WRONG=GOOD)
        self.assertEqual(came.content["kernels"], {GOOD: "wrong", BAD: "right"})
        self.assertRegex(self.summary(came), rf"DIAGNOSIS {GOOD}: wrong in (LSE|LSE, O|O); first")

    def test_there_is_no_torch(self) -> None:
        came = self.play()
        summary = self.summary(came)
        self.assertEqual((came.code, set(came.content["kernels"].values())), (1, {"right"}))
        self.assertEqual(summary.count("FAILED"), 1)
        self.assertIn("FAILED PyTorch: is not on this machine", summary)

    def test_torch_is_there_and_cannot_be_imported(self) -> None:
        packages = self.folder / "packages"
        (packages / "torch-2.11.0.dist-info").mkdir(parents=True)
        (packages / "torch-2.11.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
        )
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text("import no_such_library_of_torch\n")
        came = self.play(packages=packages)
        summary = self.summary(came)
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "right"})
        # As many parts as there are end so; their cause is told once.
        self.assertRegex(summary, r"this Python has no no_such_library_of_torch \(and \d+ more rows of this cause\)")
        self.assertEqual(summary.count("FAILED"), 1)

    def test_the_driver_is_old(self) -> None:
        came = self.play(DRIVER="12080")
        self.assertEqual((came.code, came.content["checks"]), (3, []))
        words = (
            "NOTHING WAS RUN on a GPU: the CUDA driver is for CUDA 12080, the kernels need 13000; install driver 580"
        )
        self.assertIn(words, self.summary(came))

    def test_the_gpu_is_of_another_kind(self) -> None:
        came = self.play(CAPABILITY="80")
        self.assertIn("has compute capability 8.0, the kernels are for 9.0", self.summary(came))
        self.assertEqual(came.code, 3)

    def test_there_is_no_gpu(self) -> None:
        came = self.play(GPUS="0")
        self.assertIn("there is no GPU 0, this machine shows 0", self.summary(came))
        self.assertEqual(came.code, 3)

    def test_it_is_cut(self) -> None:
        process = self.start(HANG=BAD)
        printed = ""
        # Killed without a word, as soon as something is known.
        while "so far:\n" not in printed:
            printed += process.stdout.readline()
            self.assertIsNone(process.poll(), printed)
        printed += process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        came = self.came(process)
        self.assertIn("a launch does not end", (printed + came.seen)[-SEEN:])
        self.assertEqual(came.content["checks"][-1]["kernel"], BAD)
        # A file may be there that was being written.
        self.assertIn("gpu-check.json", came.files)
        self.assertLessEqual(came.files, NAMES | {f".{it}.new" for it in NAMES})
        # What it had started dies with it.
        end = time.monotonic() + 60
        while names(str(self.out.parent)):
            self.assertLess(time.monotonic(), end, "a process was left behind")
            time.sleep(0.02)

    def test_nvidia_smi_hangs(self) -> None:
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        self.tool("nvidia-smi", f"#!/bin/sh\ntrap '' TERM INT HUP\nread word < {pipe}\n")
        came = self.play("--only", "smoke", kernels=GOOD)
        self.assertEqual((came.code, came.content["kernels"]), (0, {GOOD: "right"}))
        self.assertIn("clocks unknown: nvidia-smi does not answer", self.summary(came))
        for row in came.content["checks"]:
            self.assertEqual(row["provenance"]["clocks"], "unknown: nvidia-smi does not answer")

    @LONG
    def test_there_are_two_at_once(self) -> None:
        process = self.start(HANG=BAD)
        printed = ""
        while "smoke: backward d64, and finish_dq" not in printed:
            printed += process.stdout.readline()
            self.assertIsNone(process.poll(), printed)
        second = self.start()
        said, _ = second.communicate()
        self.assertEqual(second.returncode, 2)
        self.assertRegex(said, r"^error: another run uses .*: two at once disturb each other's times; wait for its end")
        # The first goes on as if nothing had been.
        came = self.came(process)
        self.assertEqual((came.code, came.content["kernels"]), (1, {GOOD: "right", BAD: "hang"}))

    def test_who_has_started_it_goes_away(self) -> None:
        process = self.start("--only", "smoke", kernels=GOOD)
        process.stdout.readline()
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        self.assertEqual(process.wait(), 0)
        content = json.loads((self.out / "gpu-check.json").read_text())
        self.assertEqual(content["kernels"], {GOOD: "right"})
        self.assertIn("logs.tar.gz", {it.name for it in self.out.iterdir()})

    @LONG
    def test_the_output_cannot_be_made(self) -> None:
        (self.folder / "file").write_text("")
        self.out = self.folder / "file" / "out"
        came = self.came(self.start(HANG=BAD))
        self.assertEqual(came.code, 1)
        self.assertRegex(came.seen, rf"DIAGNOSIS {BAD}: hangs: block")
        self.assertEqual(came.seen.strip().splitlines()[-1], "gpu-check.json is not whole: Not a directory")

    def test_the_disk_is_full(self) -> None:
        small = self.folder / "small"
        small.mkdir()
        # A disk of one page, for whatever is written: logs, lines, output.
        mount = f'/bin/mount -t tmpfs -o size=4k,nr_inodes=200 none {small} && exec "$@"'
        inside = ("/usr/bin/unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", mount, "sh")
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        possible = subprocess.run([*inside, "true"], capture_output=True, env=path, check=False)
        if possible.returncode != 0:
            self.skipTest("this machine makes no file system for a test")
        self.out = small / "out"
        came = self.came(self.start("--only", "smoke", kernels=GOOD, before=inside))
        # Its lines go where there is room, and come back as words.
        self.assertIn("gpu-check.json is not whole: No space left on device", came.seen)

    def test_its_time_is_over(self) -> None:
        came = self.play("--seconds", "0.5")
        self.assertIn("left out for want of time", self.summary(came))
        # Of half a second: what was checked, if anything, has passed.
        checks = came.content["checks"]
        self.assertEqual(came.code, 4 if checks and all(it["passed"] for it in checks) else 1)

    def test_the_output_takes_nothing(self) -> None:
        for name in ("gpu-check.json", "logs.tar.gz"):
            (self.out / name / "in the way").mkdir(parents=True)
        came = self.play(HANG=BAD)
        self.assertEqual(came.code, 1)
        self.assertRegex(came.seen.strip().splitlines()[-1], r"gpu-check.json is not whole: \w+")
        self.assertRegex(came.seen, rf"DIAGNOSIS {BAD}: hangs: block")
        self.assertEqual(came.files, {"gpu-check.json", "logs.tar.gz"})


def load_tests(_loader: unittest.TestLoader, tests: unittest.TestSuite, _pattern: str | None) -> unittest.TestSuite:
    """Of a module the tests of this part of the rehearsal."""
    part, parts = map(int, os.environ.get("CADRE_REHEARSED", "0/1").split("/"))
    return unittest.TestSuite([it for case in tests for it in case][part::parts])


def names(word: str) -> list[str]:
    """Living processes whose command names `word`."""
    found = []
    for it in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (it / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if word.encode() in (it / "cmdline").read_bytes() and state not in "ZX" and it.name != str(os.getpid()):
                found.append(it.name)
    return found


if __name__ == "__main__":
    if not re.fullmatch(r".+", str(PACK)) or not PACK.is_dir():
        sys.exit("CADRE_PACK names no pack; cargo test -p cadre-gpu-check --test rehearsal makes one")
    unittest.main()
