"""Programs that are no Python: tests of the Rust face, sanitizers, training runs, calibration. Each in its own session.

In: the folder with the programs. Out: rows in the report. A program that hangs, or that no time is left for, is named.
"""

import math
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import end_to_end
import sessions
from report import Report
from sessions import Ended, Work

HERE = Path(__file__).resolve().parent
# Tests that also hold on a real GPU; a process each.
TESTS = (
    *("forward", "backward", "plans", "softcap::softcap", "sinks::sinks", "linear::products"),
    *("arenas::memory", "arenas::gates", "arenas::rooms", "graphs::runs", "rows::copies", "rows::pieces"),
)
# The small shapes of all kernels, with and without softcap.
SANITIZED = ("forward", "backward", "softcap::softcap", "rows::copies")
EXCHANGE = "rows_go_from_one_process_to_another_by_copies_of_the_gpu"
FOUND = 9  # exit code of a sanitizer that found something


class Programs:
    def __init__(self, report: Report, out: Path, slower: float) -> None:
        self.report, self.out, self.slower = report, out, slower

    def environment(self) -> dict[str, str]:
        """Programs find the libraries that PyTorch has found, behind those that this process was told."""
        folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *self.report.content.get("libraries", [])]
        known = ":".join(dict.fromkeys(it for it in folders if it))
        return {"CADRE_TEST_DRIVER": "machine", "RUST_BACKTRACE": "0"} | ({"LD_LIBRARY_PATH": known} if known else {})

    def work(self, name: str, command: list[str], limit: float) -> Work:
        log = self.out / "programs" / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".log")
        return Work(name, command, limit * self.slower, log=log, environment=self.environment())

    def test(self, name: str, prefix: tuple[str, ...] = (), kind: str = "Rust face", limit: float = 40) -> Work:
        words = ["--ignored", "--test-threads=1", "--nocapture", f"emulated::{name}"]
        return self.work(f"{kind}, {name}", [*prefix, str(HERE / "device-tests"), *words], limit)

    def all_of(self, works: list[Work], width: int, end: float) -> Iterator[Ended]:
        """Those that were not cut off by the end of all."""
        for ended in sessions.run(deque(works), width, end):
            if ended.out_of_time:
                self.report.leave_out(ended.work.name + (", rest" if ended.seconds else ""))
            else:
                yield ended

    def tests(self, width: int, end: float) -> None:
        exchange = self.work("rows between two processes", [str(HERE / "exchange-tests"), EXCHANGE], 40)
        for ended in self.all_of([*(self.test(it) for it in TESTS), exchange], width, end):
            ran = "test result: ok" in ended.output and " 0 passed" not in ended.output
            what = f"{ended.why or ('exit 0' if ran else 'exit 0, but no test ran')}, {ended.seconds:.0f} s"
            passed = ran and not ended.why
            self.report.check(ended.work.name, what, passed, **({} if passed else {"tail": ended.output[-2000:]}))

    def sanitizers(self, end: float) -> None:
        """memcheck decides. racecheck is counted and its log kept.

        It is known to find races in right kernels whose warps have roles and copy by TMA (NVIDIA/cutlass 2626,
        NVIDIA/compute-sanitizer-samples 19). True and harmless: both warpgroups of a forward block write equal zeros.
        """
        found = next((str(it) for it in Path("/").glob("usr/local/cuda*/bin/compute-sanitizer")), None)
        sanitizer = shutil.which("compute-sanitizer") or found
        if sanitizer is None:
            self.report.say("  compute-sanitizer is not on this machine: NOT RUN")
            self.report.check("compute-sanitizer", "is not on this machine: not run", True)
            return
        works = []
        for tool in ("memcheck", "racecheck"):
            prefix = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND))
            # As long as there is time: whether a kernel hangs was seen before.
            works += [self.test(it, prefix, tool, math.inf) for it in SANITIZED]
        for ended in self.all_of(works, len(SANITIZED), end):
            count, deciding = findings(ended.output), ended.work.name.startswith("memcheck")
            what = f"{ended.why or 'exit 0'}, {count} findings, {ended.seconds:.0f} s"
            what += "" if deciding else " (information: known to find what is no race)"
            self.report.check(ended.work.name, what, not deciding or not ended.why, tail=ended.output[-2000:])

    def training(self, dry: bool, end: float) -> None:
        steps, tokens = (1, 128) if dry else (4, 2048)
        runs = end_to_end.Runs(HERE, steps, tokens, 60 * self.slower, self.environment())
        for row in end_to_end.check(runs, end):
            if "left_out" in row:
                self.report.leave_out(row["left_out"])
            else:
                self.report.add("checks", row)
            self.report.store()

    def calibrate(self, end: float) -> None:
        """The cost table of this GPU, as a file."""
        path = self.out / "calibration.json"
        path.unlink(missing_ok=True)
        words = ["--engine=gpu", "--head-dim=128", f"--out={path}"]
        if peak := self.report.content.get("matmul_tflops"):
            words.append(f"--linear-tflops={peak:.0f}")
        command = [str(HERE / "cadre"), "calibrate", *words]
        for ended in self.all_of([self.work("cadre calibrate", command, 60)], 1, end):
            print(ended.output.strip()[-600:], flush=True)
            self.report.check("cadre calibrate", ended.why or "exit 0", not ended.why and path.exists())


def findings(output: str) -> str:
    """The number in a sanitizer's last summary."""
    found = re.findall(r"SUMMARY: (\d+)", output)
    return found[-1] if found else "an unknown number of"
