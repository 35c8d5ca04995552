"""The side of a part that has the GPU: one child process, which may hang or die without harm to the others.

In: a part's name, units that are done, units that ended a child in a peer; or one unit, and a form of the kernels to
run it with. Out: lines of JSON for parts.py, appended one by one, so that what was told before the end is kept. A unit
that raises is a failed row; where the GPU's context is lost with it, the process ends, because nothing that follows in
it could be right.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ours
import torch
from parts import CONTEXT_LOST, COPIES, HANGS, NO_GPU, NO_ROOM, OTHER_GPU, PAIRS, RATES, kernels_of

HERE = Path(__file__).resolve().parent


@dataclass
class Unit:
    """Rows for the list `to`. {"say": …} is printed; {"at": …} says what comes next, with "peers" if one may do it."""

    name: str
    rows: Callable[[], Iterator[dict]]
    to: str = "checks"


class Child:
    def __init__(self, asked: Namespace) -> None:
        self.asked, self.peak = asked, asked.peak
        self.file = asked.lines.open("a", buffering=1)
        self.tell({"at": "the library"})
        folder = asked.lines.parent.parent / "given"
        self.library = ours.Library(
            HERE / "libcadre_attention.so", "cpu" if asked.dry else "cuda", asked.form, folder, asked.patience
        )
        self.broken = numbers(asked.broken)
        self.kernel = kernels_of(asked.part)[0]
        if not asked.dry:
            theirs = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
            one_gpu(self.library.uuid, theirs, torch.cuda.device_count())
        facts = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
        self.tell({"facts": facts | {"uuid": self.library.uuid}})

    def tell(self, line: dict) -> None:
        try:
            self.file.write(json.dumps(line) + "\n")
        except OSError as why:
            # Otherwise the parent takes the silence for a launch that hangs.
            print(f"the file of lines takes no more: {why}", flush=True)
            leave(NO_ROOM)

    def run(self, units: list[Unit]) -> int:
        done = numbers(self.asked.done)
        order = [it for it in range(len(units)) if it not in done and self.asked.unit in (None, it)]
        # A unit that ended an earlier child comes last, and is measured without peers.
        for index in sorted(order, key=lambda it: it in self.broken):
            unit = units[index]
            self.tell({"begun": index, "name": unit.name})
            try:
                for row in unit.rows():
                    self.kernel = row.get("kernel", self.kernel) if "at" in row else self.kernel
                    own = {"at", "say", "facts", "absent", "to"} & row.keys()
                    self.tell(row if own else {"to": unit.to, "row": row})
            except Exception as why:
                self.lost_with(unit, why)
            self.tell({"done": index})
            if not self.asked.dry:
                # Frees memory, so that the next batch is not refused for what this one has left.
                torch.cuda.empty_cache()
        return 0

    def lost_with(self, unit: Unit, why: Exception) -> None:
        """Reports a failed row; ends the process if the GPU does not answer any more."""
        traceback.print_exc()
        what = f"{type(why).__name__}: {why}"
        if waits := self.library.waits(self.kernel):
            self.tell({"waits": waits})
        self.tell({"raised": what})
        if isinstance(why, ours.HangsError):
            leave(HANGS)
        try:
            self.library.wait()
            if not self.asked.dry:
                torch.cuda.synchronize()
        except Exception as lost:
            print(f"the GPU's context is lost: {lost}", flush=True)
            leave(CONTEXT_LOST)
        row = {"check": f"{self.asked.part}, {unit.name}", "what": what, "error": 1.0, "passed": False}
        self.tell({"to": "checks", "row": row})

    def measured_peak(self) -> Iterator[dict]:
        import speed

        self.peak = speed.matmul_peak()
        yield {"facts": {"matmul_tflops": self.peak}}
        yield {"say": f"a bf16 product of 8192³ runs at {self.peak:.0f} TFLOP/s"}

    def bench(self, group: str) -> list[Unit]:
        import speed
        from batches import EARLY, specs

        def rows(index: int, make: Callable) -> Iterator[dict]:
            alone = index in self.broken
            if alone:
                yield {"say": "without peers: the process before ended in this batch"}
            yield from speed.measure(self.library, make(), self.peak or math.nan, not alone)

        units = [Unit("matrix product", self.measured_peak)] if group == EARLY else []
        for spec in specs():
            if spec.group == group:
                at, make = len(units), spec.make
                units.append(Unit(spec.name, lambda at=at, make=make: rows(at, make), "speeds"))
        return units

    def units(self) -> list[Unit]:
        import batches
        import correctness
        import rows

        name, asked = self.asked.part, self.asked
        if name == PAIRS:
            return [Unit("pairs", batches.check)]
        if name == COPIES:
            return [Unit("lists", lambda: rows.check(self.library, asked.seed, asked.dry))]
        if name == RATES:
            return [Unit("lists", lambda: rows.measure(self.library), "rates")]
        if name.startswith("bench "):
            return self.bench(name.removeprefix("bench "))
        dim, _, what = name.removeprefix("d").partition(" ")
        return [Unit(*it) for it in correctness.units(self.library, int(dim), what, asked.seed, asked.dry)]


def numbers(text: str) -> set[int]:
    return {int(it) for it in text.split(",") if it}


def one_gpu(driver: str, theirs: str, count: int) -> None:
    """Ends the process where PyTorch's tensors lie on another GPU than the one that Cadre's kernels run on."""
    digits = [it.rpartition("GPU-")[2].lower() for it in (driver, theirs)]
    # An older PyTorch does not say. One GPU is the same, also a slice of one (MIG), which has two names.
    if count > 1 and theirs and digits[0] != digits[1]:
        print(f"PyTorch has GPU {theirs}, the driver's first is {driver}: set CUDA_VISIBLE_DEVICES to one", flush=True)
        leave(OTHER_GPU)


def leave(code: int) -> None:
    """Without destructors: handles of peers are freed by nobody in an order that all of them like."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(asked: Namespace) -> None:
    sys.path.append(str(asked.packages))
    try:
        if not asked.dry and not torch.cuda.is_available():
            print(f"PyTorch {torch.__version__} sees no GPU: it was built for CUDA {torch.version.cuda}")
            leave(NO_GPU)
        child = Child(asked)
        leave(child.run(child.units()))
    except Exception:
        traceback.print_exc()
        leave(1)
