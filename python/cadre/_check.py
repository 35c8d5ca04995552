"""The user's own job under `cadre check`: what `init`, `batches`, attention and `report` call where CADRE_CHECK is set.

The job is started three times, and each time its own loop makes a few updates, then the process ends:

- `base` and `again`: all ranks, the batches of its loader. What came out is kept by each rank, and what a pool would
  have refused.
- `one`: a single rank, which is handed the updates of all ranks of `base` with plain attention, then probes: batches
  that differ in what must not matter. The weights are those of `base` before each update.

In: CADRE_CHECK, a folder, and CADRE_CHECK_PASS. Out: files in it; of `one` lines of what was found (`_verdict`).
Without the variable this module is not imported.
"""

import atexit
import ctypes
import dataclasses
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers

from . import _job, _local, _plain, _recut
from ._batches import Batches
from ._documents import LOCAL_TICKET
from ._drawn import Drawn, Taken
from ._layout import Layout, Shape, Stretch
from ._spanning import Exchange
from ._step import Step
from ._turns import Turns

STEPS = 2
"""Updates in which an optimizer makes a step, of which the checks need as many."""
UPDATES = 8
"""Maximum updates of a pass, where an optimizer makes no step in some, as while a scale of gradients is looked for."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Update:
    """Batches of an update, their layouts, and the state of random numbers before each."""

    batches: list[Any]
    layouts: list[list[Any]]
    """Lengths, or stretches."""
    random: list[Tensor] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)
    """The batches before `layout` got them, which may change them."""


@dataclass
class Made:
    """Results of an update."""

    losses: list[float] = field(default_factory=list)
    # Weights of all parameters before the update, in the order of the optimizers.
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    # O of each call, by micro-batch.
    attention: list[list[Tensor]] = field(default_factory=list)

    def digests(self, update: Update) -> list[tuple[str, str]]:
        """Digests of everything that a second run must repeat, in order."""
        told = [(f"micro-batch {at}'s batch", digest(it)) for at, it in enumerate(update.batches)]
        told += [(f"parameter {at}", digest(it)) for at, it in enumerate(self.weights)]
        for micro_batch, calls in enumerate(self.attention):
            told += [(f"micro-batch {micro_batch}'s attention call {at}", digest(it)) for at, it in enumerate(calls)]
        told += [(f"the gradient of parameter {at}", digest(it)) for at, it in enumerate(self.gradients)]
        return [*told, ("the loss", digest(self.losses))]


def digest(it: Any) -> str:
    """Digest of the bits of a tensor."""
    if isinstance(it, Tensor):
        it = dense(it.detach()).contiguous().flatten()
        it = it.view(torch.uint8).numpy().tobytes()
    elif isinstance(it, dict):
        it = str([(name, digest(value)) for name, value in it.items()])
    elif dataclasses.is_dataclass(it):
        return digest(vars(it))
    elif isinstance(it, (list, tuple)):
        it = str([digest(value) for value in it])
    return hashlib.sha256(it if isinstance(it, bytes) else str(it).encode()).hexdigest()[:16]


class Calls:
    """The calls of attention of an update, as a pool would see them: each layer's turn comes once in a micro-batch."""

    def __init__(self, where: tuple[int, int], shape: Shape, layouts: list[list[Stretch]]) -> None:
        self._step = Step(where, shape, layouts, pooled=True)
        self.refused: str | None = None
        """The first that a pool would refuse."""
        self.are_once = True
        """Whether each layer is called once for each batch."""

    def take(
        self, at: int, kind: str, lengths: list[int] | None, shapes: list[tuple[int, ...]], named: int | None
    ) -> None:
        step = self._step
        self.are_once &= step.forward[at] < step.layers
        try:
            step.forward_phase(kind, lengths, shapes, named, at)
        except (RuntimeError, ValueError) as why:
            self.refused = self.refused or str(why)
        step.forward[at] += self.are_once

    def end(self) -> None:
        """The update is over."""
        step = self._step
        for at, called in enumerate(step.forward):
            if called < step.layers:
                told = f"{step.where(at)}: attention was called {called} times, and {step.layers} layers were announced"
                self.refused, self.are_once = self.refused or told, False


class Check:
    """A pass of the check, in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kind = folder, os.environ["CADRE_CHECK_PASS"]
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.parameters: list[Tensor] = []
        self.made = Made()
        self.plain = False
        self.exchange = Exchange()
        self.updates: list[tuple[Update, Made]] = []
        self.calls: list[Calls] = []
        """By update; none of one whose micro-batches go through a layer together: their calls are in no order."""
        self.feed = Feed(self)
        """That of all loops."""
        self._before = optimizers.register_optimizer_step_pre_hook(self._optimize)

    def say(self, name: str, value: Any) -> None:
        torch.save(value, self.folder / self.kind / f"{name}-{self.rank}.pt")

    def _optimize(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for it in group["params"]:
                if not any(it is known for known in self.parameters):
                    self.parameters.append(it)
                self.made.weights.append(full(it))
                self.made.gradients.append(None if it.grad is None else full(it.grad))

    # Called by attention, before every forward.
    def takes(
        self, kind: str, lengths: list[int] | None, qkv: tuple[Tensor, Tensor, Tensor], layer: Tensor | None
    ) -> None:
        if qkv[0].is_cuda:
            raise NotImplementedError("cadre check tries a job on the CPU: start it with CUDA_VISIBLE_DEVICES= (none)")
        step = _job.running()
        if step and not goes_together(step) and self.is_first_forward():
            named = None if layer is None else int(layer)
            self.calls[-1].take(step.at, kind, lengths, [tuple(it.shape) for it in qkv], named)

    # Called by attention, for every forward.
    def saw(self, o: Tensor) -> None:
        if self.made.attention and self.is_first_forward():
            self.made.attention[-1].append(o.detach().clone())

    @staticmethod
    def is_first_forward() -> bool:
        """Whether a call belongs to the update and is no recompute."""
        return not _local.under_local() and torch._C._current_graph_task_id() == -1

    def attention(self, kind: str, lengths: list[int], qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Plain attention."""
        o, lse = _plain.forward(kind, lengths, *qkv)
        self.saw(o)
        return o, lse

    def gradients(
        self, kind: str, lengths: list[int], qkv: tuple[Tensor, Tensor, Tensor], dout: Tensor, dlse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _plain.backward(kind, lengths, qkv, dout, dlse)

    @staticmethod
    def spanning(lengths: list[int] | None) -> Step | None:
        """The step, if a call is of its documents and these go on in other ranks."""
        step = _job.running()
        if step is None or not step.spans or _local.under_local() or lengths not in (None, step.lengths()):
            return None
        return step

    @staticmethod
    def announced(told: list[int], ticket: int) -> tuple[list[int], int]:
        """The documents that plain attention takes, and their ticket: the announced ones, whatever a call says."""
        step = _job.running()
        if step is None or _local.under_local() or goes_together(step):
            return told, ticket
        step.refuse_unknown_recompute()
        return step.lengths(), LOCAL_TICKET - 1 - step.key()

    def begin(self, step: Step) -> None:
        """An update begins."""
        self.made = Made()
        if not goes_together(step):
            self.calls.append(Calls((self.rank, step.number), step.shape, step.layouts))

    def over(self) -> None:
        """The update is over, if one was."""
        for it in self.calls[-1:]:
            it.end()

    def handed_out(self, at: int) -> None:
        """Notes that the loop has got a batch of the update."""
        self.made.attention.append([])
        random = self.feed.update.random
        if at < len(random):
            torch.set_rng_state(random[at])
        else:
            random.append(torch.get_rng_state())

    def end(self) -> None:
        """Ends the process: code after the script's loop is no part of a check."""
        job = _job.current()
        job.ended, job.running = True, None
        atexit.unregister(job.at_exit)
        (self.folder / self.kind / f"ended-{self.rank}").touch()
        raise SystemExit(0)


def goes_together(step: Step) -> bool:
    """Whether micro-batches go through a layer together."""
    return any(len(these) > 1 for _, these in step.order)


def full(it: Tensor) -> Tensor:
    """The whole tensor, gathered if it is spread over ranks."""
    it = it.detach()
    return dense(it.full_tensor() if hasattr(it, "full_tensor") else it).cpu().clone()


def dense(it: Tensor) -> Tensor:
    """The same numbers, also of gradients that hold a few rows of an embedding."""
    return it if it.layout == torch.strided else it.to_dense()


def put(it: Tensor, value: Tensor) -> None:
    """Overwrites the whole tensor; on a single rank."""
    with torch.no_grad():
        (it.to_local() if hasattr(it, "to_local") else it).copy_(value)


class Feed:
    """The updates of a check, whatever loop asks for one. None is held back, since no pool waits for them."""

    def __init__(self, check: Check) -> None:
        self._check = check
        # Those of the loop that has asked last.
        self._layout: Callable[[Any], Layout] = list
        self._draw: Callable[[], list[Any]] = list
        self.update = Update([], [])
        """The last one, as `check.updates` or the probes hold it: the loop gets copies."""
        self._source = iter(self._next_drawn, None) if check.kind != "one" else self._probes()

    def begin(
        self, job: _job.Job, layout: Callable[[Any], Layout], draw: Callable[[], list[Any]], turns: Turns = None
    ) -> list[Any]:
        """The batches of the next update; the end of the process where there is none."""
        self._check.over()
        self._layout, self._draw = layout, draw
        if (update := next(self._source, None)) is None:
            self._check.end()
        if not all(update.layouts):
            # Ranks meet in each call on documents that span them, and this one would make none.
            raise ValueError("cadre check: a batch of this rank has no documents; give every rank some while you check")
        self.update = update
        # Whatever number of steps the script gave to `init`.
        job.steps = job.next + 1
        job.begin(update.layouts, None, turns)
        self._check.begin(job.running)
        job.running.spans = any(isinstance(it, Stretch) for layout in update.layouts for it in layout)
        return [_recut.copied(it) for it in update.batches]

    def _next_drawn(self) -> Update | None:
        """The next update of the loader; none where enough were tried, or the loader has ended."""
        check = self._check
        if self.update.batches:
            check.updates.append((self.update, check.made))
            self.update = Update([], [])
        steps = sum(bool(made.weights) for _, made in check.updates)
        drawn = self._draw() if steps < STEPS and len(check.updates) < UPDATES else []
        if not drawn:
            self._say()
            return None
        drawn = [_recut.copied(it) for it in drawn]
        batches = [_recut.copied(it) for it in drawn]
        return Update(batches, [told_layout(self._layout(it)) for it in batches], drawn=drawn)

    def _say(self) -> None:
        check = self._check
        check.say("digests", [made.digests(update) for update, made in check.updates])
        if check.kind == "base":
            check.say("calls", [(it.refused, it.are_once) for it in check.calls])
            # Rank 0 keeps weights and gradients for all: where ranks differ, an earlier check has said so.
            kept = [(update, made if check.rank == 0 else Made(losses=made.losses)) for update, made in check.updates]
            for _, made in kept:
                made.attention = []
            check.say("updates", kept)

    def _probes(self) -> Iterator[Update]:
        from . import _verdict

        return _verdict.probes(self._check, lambda batch: self._layout(batch))


class Checked(Batches):
    """`batches` under a check."""

    def __init__(self, check: Check, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._check = check

    def __next__(self) -> Any:
        batch = super().__next__()
        self._check.handed_out(self._count - len(self._drawn.left) - 1)
        return batch

    def _begin(self, job: _job.Job, drawn: Drawn) -> None:
        batches = self._check.feed.begin(job, self._layout, self._next_update, self._turns)
        drawn.left.extend(Taken(it) for it in batches)
        drawn.count = len(batches)

    def _next_update(self) -> list[Any]:
        drawn = self._drawn
        # An exception of the loader loses none of them.
        drawn.draw(drawn.held, self._accumulate)
        update, drawn.held = drawn.held, []
        return [it.batch for it in update]


def told_layout(layout: Layout) -> list[Any]:
    """The layout, as lengths if all documents are whole on this rank; on a single rank they are."""
    told: list[Any] = list(layout)
    spans = int(os.environ.get("WORLD_SIZE", "1")) > 1 and any(isinstance(it, Stretch) for it in told)
    return told if spans else [it.rows if isinstance(it, Stretch) else int(it) for it in told]


_CHECK: Check | None = None


def current() -> Check:
    """The check of this process."""
    global _CHECK
    if _CHECK is None:
        if "CADRE_CONTROL" in os.environ:
            raise RuntimeError("cadre check starts the ranks itself; give it their command, not `cadre run`")
        # Ranks of torchrun end with it, as it does with `cadre check`.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        _CHECK = Check(Path(os.environ["CADRE_CHECK"]))
        (_CHECK.folder / _CHECK.kind / f"joined-{_CHECK.rank}").touch()
    return _CHECK
