"""Everything that wants a GPU, in one call: checks, bench beside peers, training runs, sanitizers.

Usage: run.py [--out DIR] [--seconds N] [--dry] [--seed N]
       run.py --table DIR/gpu-check.json    print the table of a run, also of one that was interrupted

In: the folder of this file, as `make gpu-check` packs it: libcadre_gpu.so, device-tests, cadre, plans, data, wheels.
Needs Python with PyTorch and a Hopper GPU; builds nothing. Out: a table last, DIR/gpu-check.json beside it, exit code
1 if a check failed or it was stopped. --dry runs the checks of the host's side on the CPU, with a driver library whose
GPU is emulated; it measures nothing.

This process never touches the GPU. Whatever does is a process in a session of its own (parts.py, programs.py), so a
kernel that hangs or faults costs its own rows and some seconds. After N seconds (540), what runs is killed and what
has not begun is left out, aloud; the table is printed whatever happens.
"""

import argparse
import math
import os
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import batches
import sessions
from parts import COPIES, DEVICE, NO_GPU, PAIRS, RATES, Part, Parts
from programs import Programs
from report import Report

HERE = Path(__file__).resolve().parent
# Seconds behind the last end after which this process stops whatever it does.
GRACE = 12.0
DIMS = (128, 64, 256)
KINDS = (("forward", "backward"), ("softcap forward", "softcap backward"), ("sinks and bits",))


@dataclass
class Stage:
    name: str
    until: float  # share of all seconds
    run: Callable[[float], None]  # with its end, as `time.monotonic` counts


class OverError(Exception):
    """The time is over, or somebody wants this process to end."""


def stop(number: int, _frame: object) -> None:
    raise OverError(f"stopped by {signal.Signals(number).name}")


def go(stages: list[Stage], report: Report, seconds: float) -> None:
    """Runs all stages, one after the other; whatever happens, all ends, is stored and printed."""
    begin = time.monotonic()
    handlers = {it: signal.signal(it, stop) for it in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)}
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
    left = list(stages)
    try:
        while left:
            stage = left[0]
            end = begin + stage.until * seconds
            if time.monotonic() < end:
                report.say(stage.name)
                attempt(stage, end, report)
            else:
                report.leave_out(stage.name)
            left.pop(0)
            report.store()
    except OverError as why:
        report.content["stopped"] = str(why)
        for stage in left:
            report.leave_out(stage.name)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for it in handlers:
            signal.signal(it, signal.SIG_IGN)
        sessions.end_all()
        report.store()
        report.table()
        for it, handler in handlers.items():
            signal.signal(it, handler)


def attempt(stage: Stage, end: float, report: Report) -> None:
    try:
        stage.run(end)
    except OverError:
        raise
    except Exception as why:
        report.check(stage.name, f"{type(why).__name__}: {why}", False, tail=traceback.format_exc())


def stages(parts: Parts, programs: Programs, dry: bool) -> list[Stage]:
    """What matters most first. A stage may take what those before it have not used."""
    together = 2 if dry else 6
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // together))}

    def checks(end: float) -> None:
        names = [f"d{dim} {kind}" for kinds in KINDS for dim in DIMS for kind in kinds]
        extra = [COPIES, PAIRS] if dry else [COPIES]
        parts.run([Part(it) for it in [*names, *extra]], together, end, threads)

    def early(end: float) -> None:
        # Slow is no failure: it ends with the stage, or where nothing is told any more.
        parts.run([Part(f"bench {batches.EARLY}", math.inf, again=8), Part(RATES)], 1, end)

    def rest(end: float) -> None:
        # One at a time: they are measured.
        parts.run([Part(f"bench {it}", math.inf, again=3) for it in batches.groups()[1:]], 1, end)

    # Tests are processes with small tensors; nothing is measured.
    tests = Stage("tests of the Rust face", 0.68, lambda end: programs.tests(2 if dry else 4, end))
    training = Stage("training runs", 0.8, lambda end: programs.training(dry, end))
    if dry:
        return [Stage("kernels against PyTorch", 0.5, checks), tests, training]
    return [
        Stage("kernels against PyTorch", 0.35, checks),
        Stage("bench, early batches", 0.58, early),
        tests,
        training,
        Stage("cadre calibrate", 0.85, programs.calibrate),
        Stage("bench, the rest", 0.85, rest),
        Stage("sanitizers", 1.0, programs.sanitizers),
    ]


def unpack_wheels(folder: Path) -> None:
    """Wheels of peers that the machine's Python may lack."""
    for wheel in sorted((HERE / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--table", type=Path)
    # A child's: see parts.py.
    for name, kind in (("--part", str), ("--lines", Path), ("--packages", Path), ("--peak", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    for name in ("--done", "--broken"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.table:
        Report.read(asked.table).table()
        return 0
    if asked.part:
        import child

        return child.main(asked)
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    packages = out / "packages" if asked.dry else Path("/tmp/cadre-gpu-packages")
    unpack_wheels(packages)
    report = Report(out / "gpu-check.json", seed=asked.seed, dry=asked.dry)
    slower = 10.0 if asked.dry else 1.0
    words = ["--seed", str(asked.seed), "--packages", str(packages), *(["--dry"] if asked.dry else [])]
    parts = Parts(report, out, words, slower)
    report.say(f"seed {asked.seed}")
    device = Part(DEVICE, 90, 90)  # nothing of PyTorch is in memory yet
    ended = sessions.one(parts.work(device, None), time.monotonic() + 90, lambda _, line: parts.heard(device, line))
    if ended.code == NO_GPU:
        print("there is no GPU on this machine: nothing was run")
        return NO_GPU
    report.check("device", ended.why or "exit 0", not ended.why, tail=ended.output[-2000:])
    go(stages(parts, Programs(report, out, slower), asked.dry), report, asked.seconds - report.seconds())
    return 0 if report.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
