"""Parts of the check, each in a child process: what it tells becomes rows, and its death is a row, not the end.

In: names of parts, see child.py. Out: rows in the report. A part is a list of units. The child says which unit it
begins and which it has done; when it hangs or dies, a new child goes on behind that unit, a bounded number of times.
Nothing here touches the GPU or imports PyTorch.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import sessions
from report import Report
from sessions import Ended, Work

# Seconds until a child of Python has to say something: its imports read gigabytes where nothing is in memory yet.
IMPORTS = 180.0
HERE = Path(__file__).resolve().parent
# The last line of a Python that ends by an exception.
RAISED = re.compile(r"^[\w.]*(?:Error|Exception): .+$", re.MULTILINE)
# Exit codes of a child.
NO_GPU, CONTEXT_LOST, HANGS, NO_ROOM, OTHER_GPU = 3, 5, 6, 7, 8
DIMS = (128, 64, 256)
# Parts beside "d128 forward" and its like, and "bench GROUP".
PAIRS, COPIES, RATES = "pairs of the bench", "copies of rows", "rate of copies of rows"
# The part that times forms of kernels, and how it calls those of this build.
FORMS, BUILT = "forms", "as built"
# The check that all processes have one GPU.
GPU = "the GPU"


def kernels_of(part: str) -> tuple[str, ...]:
    """Kernels that a part of the checks or of the bench launches."""
    dim = next((it for it in DIMS if f"d{it} " in f"{part} "), 128)
    both = (f"cadre_forward_{dim}", f"cadre_backward_{dim}")
    if "softcap" in part:
        return (f"{both['backward' in part]}_softcap",)
    if part.startswith("bench") or "sinks" in part:
        return both
    return (both["backward" in part],) if "ward" in part else ("cadre_copy_rows_16", "cadre_copy_rows_4")


def also_of(part: str) -> tuple[str, ...]:
    """Kernels behind those: a part that is about a backward pass launches what ends dQ."""
    return ("cadre_finish_dq",) if any("backward" in it for it in kernels_of(part)) else ()


@dataclass
class Part:
    name: str
    limit: float = 120.0
    silence: float = 40.0
    again: int = 2  # new children after hangs and deaths
    done: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)  # ended a child in a peer
    children: int = 0
    unit: int | None = None  # under way
    place: str = ""  # the last thing that the child said it does
    with_peers: bool = False  # it may be a peer that does it
    row: str = ""
    name_of_unit: str = ""
    of: str = ""  # the one kernel that all units are about
    kernel: str = ""  # that the unit under way is about
    refused: str = ""  # why there is no GPU for it
    program: list[str] = field(default_factory=list)  # instead of a child of Python
    words: list[str] = field(default_factory=list)

    def blames(self) -> bool:
        """Whether what happens is by a kernel as it is built, not by another form of it."""
        return self.name != FORMS or self.name_of_unit.endswith(BUILT)


class Parts:
    def __init__(self, report: Report, work: Path, words: list[str], slower: float = 1.0) -> None:
        """`work` takes lines and logs; `words` go to every child; `slower` times longer are limits of emulated GPUs."""
        self.report, self.out, self.words, self.slower = report, work, words, slower
        self.program = [sys.executable, str(HERE / "run.py")]

    def run(self, parts: Iterable[Part], width: int, end: float, environment: dict[str, str] | None = None) -> None:
        by_name = {it.name: it for it in parts}
        waiting = deque(self.work(it, environment) for it in by_name.values())
        for ended in sessions.run(waiting, width, end, lambda work, line: self.heard(by_name[work.name], line)):
            part = by_name[ended.work.name]
            if self.over(part, ended):
                # The rest of this part comes before the other parts, which matter less.
                waiting.appendleft(self.work(part, environment))
            self.report.store()

    def work(self, part: Part, environment: dict[str, str] | None) -> Work:
        part.unit, part.place, part.kernel = None, "", part.of
        part.children += 1
        file = self.out / "parts" / f"{part.name.replace(' ', '-')}-{part.children}"
        words = ["--part", part.name, "--lines", f"{file}.jsonl", *self.words, *part.words]
        for option, units in (("--done", part.done), ("--broken", part.broken)):
            if units:
                words += [option, ",".join(str(it) for it in sorted(units))]
        if peak := self.report.content.get("matmul_tflops"):
            words += ["--peak", str(peak)]
        if part.program and (bad := self.bad()):
            words += ["--bad", ",".join(bad)]
        # Where Python is when it crashes, and what it printed before.
        said = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
        limits = (part.limit * self.slower, part.silence * self.slower)
        log = file.with_name(f"{file.name}.log")
        # Python's imports are silent, and long where nothing of PyTorch is in memory yet.
        first = 0.0 if part.program else max(0.0, IMPORTS - part.silence) * self.slower
        work = Work(
            part.name, [*(part.program or self.program), *words], *limits, Path(f"{file}.jsonl"), None, log, said
        )
        work.first_silence = first
        return work

    def bad(self) -> list[str]:
        """Kernels that hang or fault, by the rows so far."""
        rows = (it for it in self.report.content["checks"] if it.get("how") in ("hang", "fault"))
        return sorted({it["kernel"] for it in rows if "kernel" in it})

    def heard(self, part: Part, line: dict) -> None:
        if "row" in line:
            row = line["row"]
            if "check" in row and not part.program:
                row = row | {"part": part.name, "unit": part.unit}
            if not part.blames():
                row = {key: it for key, it in row.items() if key != "kernel"}
            self.report.add(line["to"], row)
            part.row = f"{row.get('check', row.get('case'))}: {row.get('what', row.get('kernel', ''))}"
        elif "begun" in line:
            part.unit, part.place, part.with_peers = line["begun"], line["name"], False
            part.kernel, part.name_of_unit = line.get("kernel", part.of), part.place
            self.report.say(f"{part.name}: {part.place}")
        elif "at" in line and "value" not in line:
            part.place, part.with_peers = line["at"], line.get("peers", False)
            part.kernel = line.get("kernel", part.kernel)
        elif "raised" in line:
            part.place += f", which raised {line['raised']}"
        elif "refused" in line:
            part.refused = line["refused"]
        elif "done" in line:
            part.done.add(line["done"])
            part.unit = None
        elif "not_run" in line:
            self.report.not_run(f"{part.name}: {line['not_run']}", line["why"])
        elif "say" in line:
            self.report.say(f"  {part.name}: {line['say']}")
        elif "absent" in line:
            self.report.content["absent_peers"] |= line["absent"]
        elif "facts" in line:
            self.facts(part, line["facts"])

    def facts(self, part: Part, found: dict) -> None:
        """Facts, of one GPU: a process that has another one is named, once, for its numbers are of that."""
        first, other = self.report.content.get("uuid"), found.pop("uuid", None)
        self.report.content |= found
        if first is None and other:
            self.report.content["uuid"] = other
        elif other not in (None, first):
            words = f"{part.name} has GPU {other}, the first stage had {first}: their numbers are of two GPUs"
            self.report.check(GPU, words, False, cause="another GPU")

    def over(self, part: Part, ended: Ended) -> bool:
        """Reports a child that died; true if another child should go on in its place."""
        if not ended.why:
            return False
        at = f", at: {part.place}" if part.unit is not None else ""
        if ended.out_of_time:
            self.report.leave_out(f"{part.name}, rest{at}" if part.row or at else part.name)
            return False
        # A failure of the pack says nothing of a GPU.
        if part.refused and not any(it["passed"] or "kernel" in it for it in self.report.content["checks"]):
            self.report.content["refused"] = part.refused
            return False
        words = {
            CONTEXT_LOST: "the GPU answers no more",
            HANGS: "a launch does not end",
            NO_GPU: "it sees no GPU",
            NO_ROOM: "the disk that takes what it tells is full",
            OTHER_GPU: "PyTorch has another GPU",
        }
        what = (part.refused or words.get(ended.code, ended.why)) + at
        what += f"; last row: {part.row or 'none'}"
        more: dict = {"probe": part.name} if part.program else {"part": part.name, "unit": part.unit}
        # Before its first unit, or for want of a place to tell it, a part ends by no kernel's fault; nor by a peer's.
        blamed = part.unit is not None and ended.code not in (NO_GPU, NO_ROOM) and not part.with_peers
        if part.kernel and blamed and part.blames():
            more |= {"kernel": part.kernel, "how": how(ended)}
        if ended.code == NO_GPU and not part.refused:
            more["cause"] = "PyTorch sees no GPU"
            said = [it for it in ended.output.splitlines() if "sees no GPU" in it]
            what = said[-1] if said else what
        if ended.code == OTHER_GPU:
            # The GPU is not to blame: nothing was launched on it.
            more["cause"] = "PyTorch has another GPU"
            said = [it for it in ended.output.splitlines() if "PyTorch has GPU" in it]
            what = said[-1] if said else what
        if ended.code == NO_ROOM:
            more["cause"] = "the disk is full"
        if missing := re.search(r"ModuleNotFoundError: No module named '(\w+)'", ended.output):
            more["cause"] = f"no {missing[1]}"
            what = f"this Python has no {missing[1]}"
        elif part.unit is None and (raised := RAISED.findall(ended.output)):
            # A library that PyTorch does not find, or the like: of as many parts as there are.
            more["cause"] = raised[-1]
            what = f"it cannot begin: {raised[-1][:300]}"
        self.report.check(f"part {part.name}", what, False, tail=ended.output[-2000:], **more)
        if part.unit is None or part.again == 0:
            return False
        part.again -= 1
        # What a peer may have ended is tried again without them; nothing else is tried twice.
        once_more = part.with_peers and part.unit not in part.broken
        (part.broken if once_more else part.done).add(part.unit)
        return True


def how(ended: Ended) -> str:
    """What a kernel did whose child ended so: "hang" or "fault"."""
    silent = ended.code is None or "nothing new" in ended.why or "no end" in ended.why
    return "hang" if ended.code == HANGS or silent else "fault"
