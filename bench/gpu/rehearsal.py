"""What comes back from run.py when something is wrong: played over the emulated driver, with the kernels' own source
behind it.

In: CADRE_PACK, a pack with an emulated driver; CADRE_REHEARSED, which of how many parts of each module is played
(`0/1`: all). `cargo test -p cadre-gpu-check --test rehearsal` makes packs and plays all of rehearsal*.py. Out:
unittest's verdict. Here kernels go wrong: a lost arrival at a barrier, an illegal address, operands read otherwise;
rehearsal_machine.py plays machines. The machine's tools are programs that print what the real ones do. Nothing is
judged by how long it takes.
CADRE_REHEARSE=all plays what takes more than a few seconds, too.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
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


def load_tests(_loader: unittest.TestLoader, tests: unittest.TestSuite, _pattern: str | None) -> unittest.TestSuite:
    """Of a module the tests of this part of the rehearsal."""
    part, parts = map(int, os.environ.get("CADRE_REHEARSED", "0/1").split("/"))
    return unittest.TestSuite([it for case in tests for it in case][part::parts])


if __name__ == "__main__":
    if not re.fullmatch(r".+", str(PACK)) or not PACK.is_dir():
        sys.exit("CADRE_PACK names no pack; cargo test -p cadre-gpu-check --test rehearsal makes one")
    unittest.main()
