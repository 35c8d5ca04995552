"""Programs that are no Python: tests of the Rust face, sanitizers, a profile, training runs, calibration. Each in its
own session.

In: the folder with the programs. Out: rows in the report. A program that hangs, or that no time is left for, is named.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import diagnosis
import end_to_end
import keep
import machine
import pack
import sessions
import smoke
import torch_rows
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
TENSORS = "tensors of PyTorch"
TRAINING, CALIBRATE, CALIBRATION = "training runs", "cadre calibrate", "calibration.json"
# Kernels that a program launches; what hangs or faults is not launched again.
LAUNCHED = {
    "forward": ("cadre_forward_*", "cadre_merge"),
    "backward": ("cadre_backward_*", "cadre_finish_dq"),
    "plans": ("cadre_forward_*", "cadre_backward_*", "cadre_finish_dq", "cadre_merge"),
    "softcap::softcap": ("cadre_forward_*", "cadre_backward_*", "cadre_finish_dq", "cadre_merge"),
    "sinks::sinks": ("cadre_forward_*", "cadre_backward_*", "cadre_finish_dq", "cadre_merge", "cadre_sink"),
    "graphs::runs": ("cadre_forward_*", "cadre_backward_*", "cadre_finish_dq", "cadre_merge"),
    "rows::copies": ("cadre_copy_*",),
    "rows::pieces": ("cadre_copy_*",),
    EXCHANGE: ("cadre_copy_*", "cadre_merge", "cadre_forward_*", "cadre_backward_*", "cadre_finish_dq"),
    TENSORS: ("cadre_forward_64", "cadre_forward_128", "cadre_backward_64", "cadre_backward_128", "cadre_finish_dq"),
    # Rows that stay on the GPU are copied there.
    TRAINING: ("cadre_forward_64", "cadre_backward_64", "cadre_finish_dq", "cadre_merge", "cadre_copy_*"),
}
# What a program says where that library is missing.
NO_BLAS, WITHOUT_BLAS = "has no cuBLASLt", "cuBLASLt is missing"
ONE_PROCESS = "the GPU is in compute mode EXCLUSIVE_PROCESS: one process at a time"
# Kernels whose times are a calibration: they have to be right.
CALIBRATED = ("cadre_forward_128", "cadre_backward_128")
# What a profile shows of a kernel, by ncu's names.
PROFILED = (
    *("Duration", "Compute (SM) Throughput", "Memory Throughput", "L2 Hit Rate", "Issued Warp Per Scheduler"),
    *("No Eligible", "Warp Cycles Per Issued Instruction", "Registers Per Thread"),
)
FOUND = 9  # exit code of a sanitizer that found something


class Programs:
    def __init__(self, report: Report, work: Path, out: Path, slower: float) -> None:
        """Logs go to `work`; what comes back beside the report, to `out`."""
        self.report, self.folder, self.out, self.slower = report, work, out, slower
        # Where wheels of the pack are unpacked.
        self.packages = work

    def environment(self) -> dict[str, str]:
        """Programs find the libraries that PyTorch has found, behind those that this process was told."""
        folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *self.report.content.get("libraries", [])]
        known = ":".join(dict.fromkeys(it for it in folders if it))
        return {"CADRE_TEST_DRIVER": "machine", "RUST_BACKTRACE": "0"} | ({"LD_LIBRARY_PATH": known} if known else {})

    def work(self, name: str, command: list[str], limit: float) -> Work:
        log = self.folder / "programs" / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".log")
        return Work(name, command, limit * self.slower, log=log, environment=self.environment())

    def test(self, name: str, prefix: tuple[str, ...] = (), kind: str = "Rust face", limit: float = 40) -> Work:
        words = ["--ignored", "--test-threads=1", "--nocapture", f"emulated::{name}"]
        return self.work(f"{kind}, {name}", [*prefix, str(pack.program("device-tests")), *words], limit)

    def all_of(self, works: list[Work], width: int, end: float) -> Iterator[Ended]:
        """Runs that were not cut off by the end of all."""
        for ended in sessions.run(deque(works), width, end):
            if ended.out_of_time:
                self.report.leave_out(ended.work.name + (", rest" if ended.seconds else ""))
            else:
                yield ended

    def broken(self, test: str, name: str = "") -> bool:
        """Whether a kernel that `test` launches hangs or faults; then it is said once, and not launched."""
        bad, patterns = smoke.names(self.report.content, ("hang", "fault")), LAUNCHED.get(test, ())
        those = sorted(it for it in bad if any(fnmatchcase(it, pattern) for pattern in patterns))
        if those:
            self.report.not_run(name or f"Rust face, {test}", f"{', '.join(those)} hang or fault")
        return bool(those)

    def tests(self, width: int, end: float) -> None:
        works = [self.test(it) for it in TESTS if not self.broken(it)]
        exchange = "rows between two processes"
        if machine.exclusive(self.report.content):
            self.report.not_run(exchange, ONE_PROCESS)
        elif not self.broken(EXCHANGE, exchange):
            works.append(self.work(exchange, [str(pack.program("exchange-tests")), EXCHANGE], 40))
        for ended in self.all_of(works, width, end):
            ran = "test result: ok" in ended.output and " 0 passed" not in ended.output
            if NO_BLAS in ended.output:
                self.report.not_run(ended.work.name, WITHOUT_BLAS)
                continue
            what = f"{ended.why or ('exit 0' if ran else 'exit 0, but no test ran')}, {ended.seconds:.0f} s"
            passed = ran and not ended.why
            self.report.check(ended.work.name, what, passed, **({} if passed else {"tail": ended.output[-2000:]}))

    def sanitizers(self, end: float) -> None:
        """memcheck decides. racecheck is counted and its log kept.

        It is known to find races in right kernels whose warps have roles and copy by TMA (NVIDIA/cutlass 2626,
        NVIDIA/compute-sanitizer-samples 19). True and harmless: both warpgroups of a forward block write equal zeros.
        """
        sanitizer = machine.tool("compute-sanitizer")
        if sanitizer is None:
            return self.report.not_run("sanitizers", "compute-sanitizer is not on this machine")
        works = []
        for tool in ("memcheck", "racecheck"):
            prefix = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND))
            # As long as there is time: whether a kernel hangs was seen before.
            works += [self.test(it, prefix, tool, math.inf) for it in SANITIZED if not self.broken(it)]
        for ended in self.all_of(works, len(SANITIZED), end):
            if "test result" not in ended.output and not diagnosis.first_report(ended.output):
                self.report.not_run(ended.work.name, f"compute-sanitizer runs nothing ({diagnosis.last_words(ended)})")
                continue
            count, deciding = findings(ended.output), ended.work.name.startswith("memcheck")
            what = f"{ended.why or 'exit 0'}, {count} findings, {ended.seconds:.0f} s"
            what += "" if deciding else " (information: known to find what is no race)"
            if deciding and only_shared_reads(ended.output):
                # racecheck was wrong about operands of wgmma before; these results are compared with f64 beside.
                deciding, what = False, f"{what} (information: reads of shared memory alone, of right results)"
            self.report.check(ended.work.name, what, not deciding or not ended.why, tail=ended.output[-2000:])

    def profile(self, end: float) -> None:
        """Counters of the forward and backward kernel of head dim 128, where there is a profiler; clocks stay."""
        profiler = machine.tool("ncu")
        if profiler is None:
            return self.report.not_run("profile", "ncu is not on this machine")
        for name in ("cadre_forward_128", "cadre_backward_128"):
            if self.report.content["kernels"].get(name) != "right":
                self.report.not_run(f"profile of {name}", "it is not right")
                continue
            lines = self.folder / "programs" / f"profile-{name}.jsonl"
            sections = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "SchedulerStats", "LaunchStats")
            words = [word for it in sections for word in ("--section", it)]
            asked = [
                "--clock-control",
                "none",
                "--kernel-name",
                f"regex:^{name}$",
                "--launch-skip",
                "1",
                "--launch-count",
                "1",
            ]
            probe = [
                str(pack.program(smoke.PROBE)),
                "--part",
                "time",
                "--profile",
                "--lines",
                str(lines),
                "--patience",
                "60",
            ]
            work = self.work(f"profile of {name}", [profiler, *asked, *words, *probe], 40)
            for ended in self.all_of([work], 1, end):
                found = counters(ended.output)
                if not found:
                    self.report.not_run(
                        ended.work.name, f"ncu gave no counters ({ended.why or 'exit 0'}); its log is kept"
                    )
                    continue
                told = ", ".join(f"{key} {it}" for key, it in found.items())
                self.report.note(f"{name} by ncu: {told}")

    def training(self, dry: bool, end: float) -> None:
        steps, tokens = (1, 128) if dry else (4, 2048)
        if machine.exclusive(self.report.content):
            return self.report.not_run(TRAINING, ONE_PROCESS)
        if self.broken(TRAINING, TRAINING):
            return
        trace = None if dry else self.folder / "trace.json"
        runs = end_to_end.Runs(HERE, steps, tokens, 60 * self.slower, self.environment(), trace)
        for row in end_to_end.check(runs, end):
            if "note" in row:
                self.report.note(row["note"])
            elif "left_out" in row:
                self.report.leave_out(row["left_out"])
            elif NO_BLAS in row.get("tail", ""):
                self.report.not_run(row["check"], WITHOUT_BLAS)
            else:
                self.report.add("checks", row)
            self.report.store()
        self.hand_over(trace)

    def tensors(self, dry: bool, end: float) -> None:
        """Rows that PyTorch has on the GPU, handed to a job."""
        if machine.exclusive(self.report.content):
            return self.report.not_run(TENSORS, ONE_PROCESS)
        if self.broken(TENSORS, TENSORS):
            return
        if sys.version_info < torch_rows.OLDEST:
            return self.report.not_run(TENSORS, "the package needs Python 3.10 or newer")
        if not (self.packages / "cadre").is_dir():
            return self.report.not_run(TENSORS, "the pack has no package cadre that can be unpacked")
        words = ["--emulated"] if dry else []
        for row in torch_rows.check(self.packages, 30 * self.slower, self.environment(), words, end):
            if "left_out" in row:
                self.report.leave_out(row["left_out"])
            else:
                self.report.add("checks", row)
            self.report.store()

    def hand_over(self, file: Path | None) -> None:
        """What a program wrote, if it is whole."""
        if file and file.exists() and (why := keep.whole(file, self.out)):
            self.report.note(why)

    def calibrate(self, end: float) -> None:
        """The cost table of this GPU, as a file."""
        if bad := [it for it in CALIBRATED if self.report.content["kernels"].get(it) != "right"]:
            return self.report.not_run(CALIBRATE, f"{', '.join(bad)}: not known to be right")
        # Where it comes back from: it grows, and a run that is cut keeps what was measured.
        path = self.out / CALIBRATION
        words = ["--engine=gpu", "--head-dim=128", f"--out={path}"]
        if peak := self.report.content.get("matmul_tflops"):
            words.append(f"--linear-tflops={peak:.0f}")
        command = [str(pack.program("cadre")), "calibrate", *words]
        for ended in self.all_of([self.work(CALIBRATE, command, 60)], 1, end):
            self.report.check(CALIBRATE, ended.why or "exit 0", not ended.why, tail=ended.output[-2000:])
        keep.tidy(self.out)
        if words := partial(path):
            self.report.note(f"{path.name} is partial: {words}; what it has is kept")


def partial(path: Path) -> str:
    """How much a calibration has that was cut; nothing of a whole one, and of none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text()).get("partial", "")
    return ""


def counters(output: str) -> dict[str, str]:
    """What ncu's tables have: a name, a unit that some counters have not, a number."""
    found = {}
    for key in PROFILED:
        if it := re.search(rf"^ *{re.escape(key)} +(?:(\S+) +)?([0-9.,]+) *$", output, re.MULTILINE):
            found[key] = f"{it[2]} {it[1] or ''}".strip()
    return found


def findings(output: str) -> str:
    """The number in a sanitizer's last summary."""
    found = re.findall(r"SUMMARY: (\d+)", output)
    return found[-1] if found else "an unknown number of"


def only_shared_reads(output: str) -> bool:
    """Whether the tests passed and all that memcheck reports are reads of shared memory."""
    kinds = re.findall(r"========= (Invalid \S+ (?:read|write)|\S+ Error|Program hit)", output)
    return bool(kinds) and set(kinds) == {"Invalid __shared__ read"} and "test result: ok" in output
