"""Everything that wants a GPU, in one call: a smoke test, checks, decisions, bench beside peers, training runs,
sanitizers.

Usage: run.py [--out DIR] [--seconds N] [--dry] [--seed N] [--only STAGE,…] [--kernels NAME,…]
       run.py --table DIR/gpu-check.json    print the summary of a run, also of one that was interrupted

In: the folder of this file, as `make gpu-check` packs it: cadre-gpu-probe, libcadre_attention.so, device-tests, cadre,
forms, plans, data, wheels. Needs a Hopper GPU, and Python with PyTorch for what is compared with PyTorch; builds
nothing. Out: DIR gets gpu-check.json, calibration.json, trace.json and logs.tar.gz, and nothing else; the last 12,000
characters of what is printed hold the summary, failures last; exit code 1 if a check failed or it was stopped, 2 if
another run is under way or a word is wrong, 3 if there is no GPU for it, 4 if all that was run passed and parts were
left out for want of time. --dry runs what can be run over an emulated driver that the library path names; it measures
nothing.

This process never touches the GPU. Whatever does is a process in a session of its own (parts.py, programs.py), so a
kernel that hangs or faults costs its own rows and some seconds. After N seconds (540), what runs is killed and what
has not begun is left out, aloud; the summary is printed whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# A Python may be told to trust no folder of a script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import batches
import diagnosis
import keep
import machine
import pack
import sessions
import smoke
from parts import COPIES, DIMS, NO_GPU, PAIRS, RATES, Part, Parts, also_of, kernels_of
from programs import Programs
from report import Report

HERE = Path(__file__).resolve().parent
# Seconds behind the last end after which this process stops whatever it does.
GRACE = 10.0
# Seconds behind its end that the smoke test may take, and a stage to diagnose what it alone has found.
MORE = 20.0
TWO_RUNS = 2
OLDEST = (3, 9)
KINDS = (("forward", "backward"), ("softcap forward", "softcap backward"), ("sinks and bits",))


@dataclass
class Stage:
    """`budget` seconds are its own; it gets what those before it have not used besides."""

    name: str
    budget: float
    run: Callable[[float], None]  # with its end, as `time.monotonic` counts


class OverError(BaseException):
    """The time is over, or somebody wants this process to end. Nobody takes it for an error of what was under way."""


class RefusedError(Exception):
    """There is no GPU for any of it."""


# What ends it: the time that is over, or somebody.
STOPS = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)


def stop(number: int, _frame: object) -> None:
    # Once: another signal, which often comes with the first, must not end what stores and prints. With SIG_IGN Python
    # complains of one that came just before.
    for it in STOPS:
        signal.signal(it, lambda *_: None)
    raise OverError(f"stopped by {signal.Signals(number).name}")


def go(
    stages: list[Stage],
    report: Report,
    seconds: float,
    behind: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Runs `before`, then all stages, one after the other, `behind` after each; whatever happens, all is stored and
    printed."""
    begin = time.monotonic()
    handlers = {it: signal.signal(it, stop) for it in STOPS}
    signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)
    left = list(stages)
    # Budgets are shares where less time is given than they are together.
    slower = min(1.0, seconds / sum(it.budget for it in stages)) if stages else 1.0
    due = 0.0
    try:
        before()
        while left:
            stage = left[0]
            due += stage.budget * slower
            # The last may take all that is left.
            end = begin + (due if len(left) > 1 else seconds)
            if time.monotonic() < end:
                report.say(f"{stage.name}, {end - time.monotonic():.0f} s at most")
                attempt(stage, end, report)
            else:
                report.leave_out(stage.name)
            left.pop(0)
            report.store()
            report.so_far()
            behind()
    except RefusedError:
        for stage in left[1:]:
            report.content["not_run"].append({"name": stage.name, "why": "there is no GPU for it"})
    except OverError as why:
        report.content["stopped"] = str(why)
        for stage in left:
            report.leave_out(stage.name)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for it in handlers:
            signal.signal(it, lambda *_: None)
        sessions.end_all()
        behind()
        report.store()
        report.table()
        for it, handler in handlers.items():
            signal.signal(it, handler)


def attempt(stage: Stage, end: float, report: Report) -> None:
    try:
        stage.run(end)
    except RefusedError:
        raise
    except Exception as why:
        report.check(stage.name, f"{type(why).__name__}: {why}", False, tail=traceback.format_exc())


class Plan:
    """What the stages do."""

    def __init__(
        self,
        report: Report,
        parts: Parts,
        programs: Programs,
        smoke_test: smoke.Smoke,
        closer: diagnosis.Diagnosis,
        dry: bool,
    ) -> None:
        self.report, self.parts, self.programs, self.smoke, self.dry = report, parts, programs, smoke_test, dry
        self.closer = closer

    def first(self, end: float) -> None:
        # Into the time of the diagnosis, where the driver was slow to open: without a row there is nothing to diagnose.
        self.smoke.run(end + MORE)
        if "refused" in self.report.content:
            raise RefusedError
        self.report.origin()
        if words := machine.used_by_others(self.report.content):
            self.report.note(words)

    def width(self, most: int) -> int:
        """Processes at once that may have the GPU."""
        return 1 if machine.exclusive(self.report.content) else most

    def tests(self, end: float) -> None:
        # Processes with small tensors; nothing is measured.
        self.programs.tests(self.width(2 if self.dry else 4), end)

    def sound(self, names: list[str], bad: tuple[str, ...]) -> list[str]:
        """Names of those whose kernels are not known to be bad; the report names the others."""
        broken, good = smoke.names(self.report.content, bad), []
        ends = smoke.names(self.report.content, ("hang", "fault"))
        for name in names:
            if those := sorted(broken & set(kernels_of(name)) | ends & set(also_of(name))):
                self.report.not_run(name, f"{', '.join(those)}: diagnosed")
            else:
                good.append(name)
        return good

    def torch(self, what: str) -> bool:
        if self.report.content.get("torch"):
            return True
        if not any(it["check"] == "PyTorch" for it in self.report.content["checks"]):
            words = "is not on this machine: nothing is compared with it, and no peer is measured"
            self.report.check("PyTorch", words, False, cause="no torch")
        self.report.not_run(what, "there is no PyTorch")
        return False

    def checks(self, end: float) -> None:
        names = [f"d{dim} {kind}" for kinds in KINDS for dim in DIMS for kind in kinds]
        extra = [COPIES, PAIRS] if self.dry else [COPIES]
        if not self.torch("kernels against PyTorch"):
            return
        together = self.width(2 if self.dry else 6)
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // together))}
        asked = {it for it in self.smoke.kernels.split(",") if it}
        names = [it for it in [*names, *extra] if not asked or asked >= set(kernels_of(it))]
        names = self.sound(names, ("hang", "fault", "wrong"))
        of = {it: kernels_of(it)[0] for it in names if len(kernels_of(it)) == 1}
        self.parts.run([Part(it, of=of.get(it, "")) for it in names], together, end, threads)
        # What only larger shapes show; the bench does not wait for it again.
        self.judge(end + MORE)

    def tensors(self, end: float) -> None:
        if self.torch("tensors of PyTorch"):
            self.programs.tensors(self.dry, end)

    def forms(self, end: float) -> None:
        self.smoke.forms(end)
        self.judge(end + MORE)

    def judge(self, end: float) -> None:
        """What each kernel does by now, and a closer look at those that are not right."""
        self.smoke.judge()
        self.closer.run(end)

    def bench(self, names: list[str], end: float, again: int) -> None:
        # Slow is no failure: it ends with the stage, or where nothing is told any more. One at a time, to be measured.
        if self.torch("bench beside peers"):
            names = self.sound(names, ("hang", "fault"))
            self.parts.run([Part(it, math.inf, again=again) for it in names], 1, end)
            self.judge(end + MORE)

    def stages(self) -> list[Stage]:
        """What matters most first. Budgets are 540 s together: `run.py` ends after as many."""
        early, *rest = [f"bench {it}" for it in batches.groups()]
        first = Stage("smoke: every kernel once", 30, self.first)
        diagnosis = Stage("diagnosis", 55, self.closer.run)
        checks = Stage("kernels against PyTorch", 100, self.checks)
        tests = Stage("tests of the Rust face", 30, self.tests)
        forms = Stage("decisions between forms", 45, self.forms)
        tensors = Stage("tensors of PyTorch", 25, self.tensors)
        training = Stage("training runs", 60, lambda end: self.programs.training(self.dry, end))
        if self.dry:
            return [first, diagnosis, checks, tests, forms, tensors, training]
        return [
            *(first, diagnosis, checks, tests, forms),
            Stage("bench, early batches", 85, lambda end: self.bench([early, RATES], end, 8)),
            *(tensors, training),
            # What the rest of the bench leaves is little.
            Stage("cadre calibrate", 20, self.programs.calibrate),
            Stage("bench, the rest", 30, lambda end: self.bench(rest, end, 3)),
            Stage("sanitizers", 25, self.programs.sanitizers),
            Stage("profile", 35, self.programs.profile),
        ]


def place(word: str) -> Path:
    if not word:
        # A variable that is not set would fill the folder where this is called.
        raise argparse.ArgumentTypeError("names no folder")
    return Path(word)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=place, default=Path("gpu-check-results"))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="beginnings of the names of stages, by commas")
    parser.add_argument("--kernels", default="", help="the smoke test asks these alone, by commas")
    parser.add_argument("--table", type=Path)
    # A child's: see parts.py.
    kinds = {"--part": str, "--lines": Path, "--packages": Path, "--peak": float, "--unit": int}
    parser.add_argument("--patience", type=float, default=10.0, help=argparse.SUPPRESS)
    for name, kind in kinds.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    for name in ("--done", "--broken", "--form"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # A terminal that cannot show a character gets its number.
        stream.reconfigure(errors="backslashreplace")
    if sys.version_info < OLDEST:
        print(f"error: this is Python {sys.version.split()[0]}, it needs 3.9 or newer: start it with such a one")
        return 1
    asked = arguments()
    if asked.table:
        try:
            Report.read(asked.table).table()
        except (OSError, ValueError) as why:
            print(f"error: {asked.table} is no gpu-check.json of a run: {why}")
            return 1
        return 0
    if asked.part:
        import child

        return child.main(asked)
    machine.go_on_with_torch(HERE / "run.py")
    # A stream that waits for a word of the host would wait for ever.
    os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
    # Rows do not say which kernels they are of: those that the GPU takes by itself.
    os.environ.pop("CADRE_GPU_KERNELS", None)
    # Whoever has started it may go away: what is written is worth as much.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    out = asked.out.absolute()
    with contextlib.suppress(OSError):
        # What cannot be made cannot be written either, and the report says so.
        out.mkdir(parents=True, exist_ok=True)
    _held, why = pack.alone(HERE / "run.py", out)
    if why:
        print(f"error: {why}")
        return TWO_RUNS
    keep.clear(out)
    folder = pack.working_folder()
    if folder is None:
        print("error: no folder takes a file: set TMPDIR to one that does; nothing was run")
        return 1
    try:
        return whole(asked, out, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepared(report: Report, work: Path, packages: Path) -> list[str]:
    """Facts, and a pack that runs; words of what is wrong with it."""
    facts, why = pack.facts()
    wrong = [why]
    if those := pack.wrong_files(facts):
        wrong.append(f"{'; '.join(those[:8])}{'; …' if len(those) > 8 else ''}: copy the pack again")
    report.content |= facts | machine.found_here() | machine.facts()
    wrong += [machine.too_old(facts.get("glibc", "")), *pack.make_runnable(work), *pack.unpack_wheels(packages)]
    return wrong


def whole(asked: argparse.Namespace, out: Path, work: Path) -> int:
    logs, packages = work / "logs", work / "packages"
    report = Report(out / "gpu-check.json", seed=asked.seed, dry=asked.dry)
    # Whoever is killed while it looks at the pack has a file that says so little.
    report.store()
    warm = machine.Beside([sys.executable, "-c", "import torch"], logs / "import-of-torch.log")
    # Once the probe has told it: of several GPUs, clocks of another one would be written down.
    used = lambda: str(report.content.get("uuid", ""))  # noqa: E731
    card, clocks = machine.Card(logs / "card.csv", used), machine.Clocks(logs / "clocks.csv", used)
    report.card, report.clocks = card.now, clocks.now

    def before() -> None:
        try:
            wrong = list(filter(None, prepared(report, work, packages)))
        except Exception as why:
            wrong = [f"{type(why).__name__}: {why}"]
        report.say(f"seed {asked.seed}, commit {report.content.get('commit')}")
        for words in wrong:
            report.check("pack", words, False)

    slower = 10.0 if asked.dry else 1.0
    words = ["--seed", str(asked.seed), "--packages", str(packages), *(["--dry"] if asked.dry else [])]
    parts = Parts(report, logs, words, slower)
    programs = Programs(report, logs, out, slower)
    programs.packages = packages
    smoke_test = smoke.Smoke(report, parts, programs.environment)
    smoke_test.kernels = asked.kernels
    closer = diagnosis.Diagnosis(report, parts, logs, programs.environment)
    stages = Plan(report, parts, programs, smoke_test, closer, asked.dry).stages()
    only = tuple(it for it in asked.only.split(",") if it)
    for word in only:
        if not any(it.name.startswith(word) for it in stages):
            report.check("stages", f"none begins with {word}: {', '.join(it.name for it in stages)}", False)
    stages = [it for it in stages if it.name.startswith(only or "")]

    def keep_logs() -> None:
        if why := keep.archive(logs, out):
            if "unkept" not in report.content:
                report.say(why)
            report.content["unkept"] = why

    try:
        go(stages, report, asked.seconds - report.seconds(), keep_logs, before)
    finally:
        clocks.end()
        card.end()
        warm.end()
        keep.tidy(out)
    if "refused" in report.content:
        return NO_GPU
    return report.verdict()


if __name__ == "__main__":
    code = main()
    # Without the end of an interpreter, which may wait for a disk or a reader that is gone.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)
