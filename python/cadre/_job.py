"""The job of this process: which step runs, what was announced for it, whose turn it is.

In: a model's shape, and which documents the batches hold. Out: steps that have begun, or computing in this process
where there is no job. One process is one rank of one job, so there is one `Job`.

It checks what the session cannot know (kinds of layers, boundaries of documents) and whose turn it is before anything
is sent, so that a step goes on after a refusal. An exception that ends the process ends the job everywhere with it. A
forked child is no rank: its calls are refused.
"""

import atexit
import contextlib
import contextvars
import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ._kept import Kept
from ._layout import Layout, Shape, Stretch, lengths_of, name_layers
from ._native import Session

Batch = TypeVar("Batch")


@dataclass
class Step:
    """The step that runs."""

    number: int
    lengths: list[int]
    whole: bool
    """Whether every document lies whole on this rank."""
    began: float
    forward: int = 0
    """Phases that the pool was asked for; `backward` likewise."""
    backward: int = 0
    kept: dict[int, Kept] = field(default_factory=dict)
    """By layer, until its backward."""
    recomputed: int | None = None
    """The layer that a call without a layer's number was taken for last, in a backward."""
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    validation_loss: float | None = None
    tokens: int | None = None


class Job:
    """See the module."""

    def __init__(self, shape: Shape, session: Session | None, steps: int) -> None:
        self.shape, self.session, self.steps = shape, session, steps
        self.rank, self.ranks = (session.rank, session.ranks) if session else (0, 1)
        self.process = os.getpid()
        self.next = 0
        self.running: Step | None = None
        self.ended = False
        # Of the step to begin next, if it was announced.
        self.announced: list[Stretch] | None = None

    def check_process(self) -> None:
        """A forked process has the memory of a rank, and neither its threads nor its turn."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, which alone is in the job; call cadre there, "
                "or evaluate here under cadre.local()"
            )

    def stretches(self, layout: Layout) -> list[Stretch]:
        """Documents that lie whole on a rank are numbered so that no other rank has the number."""
        whole = [
            it if isinstance(it, Stretch) else Stretch(self.rank + at * self.ranks, int(it), 0, int(it))
            for at, it in enumerate(layout)
        ]
        if len({isinstance(it, Stretch) for it in layout}) > 1:
            raise ValueError(f"rank {self.rank}: a layout has lengths and stretches; write stretches alone")
        if not whole or any(not 0 <= it.start < it.end <= it.rows for it in whole):
            raise ValueError(f"rank {self.rank}: layout {list(layout)}; give documents of 1 row or more")
        return whole

    def announce(self, step: int, stretches: list[Stretch]) -> None:
        documents = dict.fromkeys((it.document, it.rows) for it in stretches)
        self.session.announce(step, list(documents), [(it.document, it.start, it.end) for it in stretches])
        self.announced = stretches

    def begin(self, layout: Layout, following: Layout | None) -> bool:
        """Ends the step that runs and begins the next one; whether there is one."""
        if self.ended:
            raise RuntimeError(f"rank {self.rank}: the job has ended; leave the loop when begin_step returns False")
        if missing := self.missing():
            raise RuntimeError(missing)
        self.end_step()
        if self.next == self.steps:
            return self.end()
        stretches = self.stretches(layout)
        # Refused before the step begins, not when it is too late to say so.
        after = self.stretches(following) if following is not None and self.next + 1 < self.steps else None
        if self.session:
            if self.announced is None:
                self.announce(self.next, stretches)
            elif self.announced != stretches:
                raise ValueError(
                    f"rank {self.rank}: step {self.next} was announced with {self.announced} and begins with "
                    f"{stretches}; give begin_step the layout that was `next` before"
                )
            if (state := self.session.begin(self.next)) != "step":
                return self.leave(state)
            self.announced = None
            if after is not None:
                self.announce(self.next + 1, after)
        whole = all(it.end - it.start == it.rows for it in stretches)
        self.running = Step(self.next, [it.end - it.start for it in stretches], whole, time.monotonic())
        self.next += 1
        return True

    def missing(self) -> str | None:
        """What the step that runs lacks to be over."""
        step, layers = self.running, len(self.shape.kinds)
        if step is None or self.session is None or step.forward == step.backward == layers:
            return None
        return (
            f"rank {self.rank}, step {step.number}: {step.forward} of {layers} forward phases and {step.backward} of "
            f"{layers} backward phases were called; a step is over when all were"
        )

    def end_step(self) -> None:
        step, self.running = self.running, None
        if step and self.session:
            tokens = sum(step.lengths) * self.ranks if step.tokens is None else step.tokens
            self.session.done(
                step.number,
                loss=step.loss,
                gradient_norm=step.gradient_norm,
                learning_rate=step.learning_rate,
                validation_loss=step.validation_loss,
                tokens=tokens,
                seconds=time.monotonic() - step.began,
            )

    def end(self) -> bool:
        """Of all steps."""
        state = self.session.begin(self.steps) if self.session else "completed"
        return self.leave("completed" if state == "step" else state)

    def leave(self, how: str) -> bool:
        if not self.ended:
            self.ended = True
            if self.session:
                self.session.leave(how)
        return False

    def fail(self, error: BaseException | None) -> None:
        """Leaves because of what ends this process."""
        why = f"{type(error).__name__}: {error}" if error else "its process ended; call cadre.finish() at the end"
        where = f"step {self.running.number}" if self.running else f"before step {self.next}"
        self.leave(f"rank {self.rank}, {where}: {why}")

    def at_exit(self) -> None:
        """A rank that ends in the middle takes the job with it, so that no other rank waits for it."""
        if not self.ended and os.getpid() == self.process:
            self.fail(getattr(sys, "last_value", None))

    def in_child(self) -> None:
        """After a fork: the session is never dropped there, which would wait for threads that only the rank has."""
        if self.session:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))

    def forward_phase(
        self, step: Step, kind: str, lengths: list[int] | None, shapes: list[tuple[int, ...]], named: int | None
    ) -> tuple[int, Kept | None]:
        """The layer whose turn it is, or which one is recomputed, and what its forward came to; refuses what is not the
        announced one's, before anything is sent."""
        shape, layers = self.shape, len(self.shape.kinds)
        where = f"rank {self.rank}, step {step.number}"
        # Autograd is at work in this thread: a forward there is a recompute.
        is_again = torch._C._current_graph_task_id() != -1
        if is_again:
            layer = self.recomputed_layer(step, named, where)
        elif (layer := step.forward) == layers:
            raise RuntimeError(
                f"{where}: all {layers} forward phases were called; evaluate under cadre.local(), and begin a step for "
                "each micro-batch"
            )
        elif named not in (None, layer):
            raise ValueError(f"{where}: layer {named} is called, and it is the turn of layer {layer}")
        if kind != shape.kinds[layer]:
            raise ValueError(
                f"{where}: layer {layer} is {shape.kinds[layer]} and the call is {kind}; call layers in order"
            )
        if lengths is not None and lengths != step.lengths:
            raise ValueError(
                f"{where}: cu_seqlens say {lengths}, announced were {step.lengths}; pass those of the batch"
            )
        rows, dim = sum(step.lengths), shape.head_dim
        wanted = [(rows, shape.query_heads, dim), *[(rows, shape.kv_heads, dim)] * 2]
        for name, found, announced in zip("qkv", shapes, wanted, strict=True):
            if found != announced:
                raise ValueError(f"{where}, layer {layer}: {name} is {found}, announced was {announced}")
        return layer, step.kept[layer] if is_again else None

    def recomputed_layer(self, step: Step, named: int | None, where: str) -> int:
        """Which layer's forward a call in a backward repeats. A call without a layer's number is the one whose backward
        is next, which a segment of one layer is."""
        layers, turn = len(self.shape.kinds), len(self.shape.kinds) - 1 - step.backward
        if step.forward < layers:
            raise RuntimeError(
                f"{where}: a recompute after {step.forward} of {layers} forward phases; call backward when all layers "
                "are forward"
            )
        layer = turn if named is None else named
        if layer not in step.kept:
            raise RuntimeError(f"{where}: layer {layer} is recomputed, and its backward is over")
        if named is None:
            if step.recomputed == turn:
                raise RuntimeError(
                    f"{where}: two forwards are recomputed before the backward of layer {turn}, and nothing says of "
                    "which layers; checkpoint each layer by itself, or give init the model of transformers"
                )
            step.recomputed = turn
        return layer

    def backward_phase(self, number: int) -> tuple[Step, int]:
        """Step and layer of a forward's ticket; refuses what is not the next backward, before anything is sent."""
        self.check_process()
        of, layer = divmod(number, len(self.shape.kinds))
        step, where = self.running, f"rank {self.rank}: backward of step {of}, layer {layer}"
        if step is None or step.number != of:
            now = f"step {step.number} runs" if step else "no step runs"
            raise RuntimeError(f"{where}, while {now}; call backward before the next step")
        layers = len(self.shape.kinds)
        if step.forward < layers:
            raise RuntimeError(
                f"{where}, after {step.forward} of {layers} forward phases; call backward when all layers are forward"
            )
        turn = layers - 1 - step.backward
        if layer > turn:
            raise RuntimeError(f"{where}, for a second time; a step has one backward (leave retain_graph out)")
        if layer < turn:
            raise RuntimeError(
                f"{where}, and it is the turn of layer {turn}; the loss depends on all layers, in their order"
            )
        return step, layer


_JOB: Job | None = None
_LOCAL: contextvars.ContextVar[bool] = contextvars.ContextVar("cadre.local", default=False)


def current() -> Job | None:
    """The job of this process, if `init` was called."""
    return _JOB


def running() -> Step | None:
    """The step that runs, whoever computes it."""
    return _JOB.running if _JOB else None


def under_local() -> bool:
    """Whether the call is under `local()`."""
    return _LOCAL.get()


def pooled() -> tuple[Job, Step] | None:
    """The job and its step if a call belongs to the pool."""
    if _JOB is None or _JOB.session is None or _JOB.running is None or _LOCAL.get():
        return None
    _JOB.check_process()
    return _JOB, _JOB.running


def init(model: Any, *, steps: int, seed: int = 0, threads: int | None = None) -> None:
    """Joins the job that started this process, once, with the layers of `model` (of transformers, or a `Shape`).

    Every rank gives the same model, `steps` and `seed`. `threads` compute in place (default: as many as torch has).
    In a process that no job has started, attention is computed here, which is said once on stderr.
    """
    global _JOB
    if _JOB is not None:
        raise RuntimeError("init was called before; a process is one rank of one job")
    if steps < 1:
        raise ValueError(f"init: steps is {steps}; a job has 1 or more")
    shape, session = Shape.of(model), None
    if "CADRE_CONTROL" in os.environ:
        heads = (shape.query_heads, shape.kv_heads, shape.head_dim)
        threads = threads or torch.get_num_threads()
        session = Session.join(kinds=list(shape.kinds), heads=heads, steps=steps, seed=seed, threads=threads)
        name_layers(model, len(shape.kinds))
    else:
        print("cadre: no job has started this process; core attention is computed here", file=sys.stderr)
    _JOB = Job(shape, session, steps)
    atexit.register(_JOB.at_exit)
    os.register_at_fork(after_in_child=_JOB.in_child)


def _joined(what: str) -> Job:
    if _JOB is None:
        raise RuntimeError(f"{what} was called before cadre.init")
    _JOB.check_process()
    return _JOB


def begin_step(layout: Layout, next: Layout | None = None) -> bool:  # noqa: A002
    """Ends the step that runs, if any, and begins the one that holds these documents; `False` where the job is over.

    `next` is the layout of the step after it, which is planned meanwhile; without it the next step begins with a
    round trip.
    """
    return _joined("begin_step").begin(layout, next)


def finish() -> None:
    """Ends the last step and leaves the job. `batches` does it by itself; a job that has steps left fails. While an
    exception is under way, as in `finally`, the job fails with it."""
    job = _joined("finish")
    if job.ended:
        return
    error = sys.exc_info()[1]
    if error and not (isinstance(error, SystemExit) and not error.code):
        return job.fail(error)
    reason = job.missing()
    if reason is None and job.next < job.steps:
        reason = f"rank {job.rank} left after {job.next} of {job.steps} steps; give every rank the same steps"
    if reason is not None:
        job.leave(reason)
        raise RuntimeError(f"finish: {reason}")
    job.end_step()
    job.end()


def batches(loader: Iterable[Batch], layout: Callable[[Batch], Layout] = lengths_of) -> Iterator[Batch]:
    """The batches of `loader`, a step each, as many as the job has steps. One batch is held back: its documents are
    announced while the step before runs. The loop ends early when the job was asked to stop."""
    job = _joined("batches")
    iterator, first = iter(loader), job.next

    def draw(step: int) -> Batch:
        try:
            return next(iterator)
        except StopIteration:
            raise ValueError(
                f"rank {job.rank}: the loader has {step - first} batches for {job.steps - first} steps; "
                "give every rank the same `steps`, and a loader that lasts"
            ) from None

    batch = draw(first) if first < job.steps else None
    for step in itertools.count(first):
        held = draw(step + 1) if step + 1 < job.steps else None
        if not job.begin(layout(batch) if step < job.steps else (), None if held is None else layout(held)):
            return
        yield batch
        batch = held


def report(
    *,
    loss: float | torch.Tensor,
    tokens: int | None = None,
    gradient_norm: float | torch.Tensor = 0.0,
    learning_rate: float = 0.0,
    validation_loss: float | torch.Tensor | None = None,
) -> None:
    """Says what the step came to, for logs and live views: the mean loss and the tokens of all ranks (default: the
    rows of this rank times the ranks); `validation_loss` in steps that evaluate documents that are held out."""
    if (step := _joined("report").running) is None:
        raise RuntimeError("report was called outside of a step")
    step.loss, step.tokens = float(loss), tokens
    step.gradient_norm, step.learning_rate = float(gradient_norm), learning_rate
    step.validation_loss = None if validation_loss is None else float(validation_loss)


def busy(seconds: float) -> None:
    """Says that this rank is at work elsewhere, for so long at most, as when it saves or evaluates the model, and that
    it does not stand still. Its next call of `cadre` ends that. Ranks that wait for it meanwhile say so, too."""
    job = _joined("busy")
    if job.session and not job.ended:
        job.session.busy(seconds)


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Attention inside is computed in this process, whatever step runs: for evaluation. Documents lie whole on the
    rank, and every call says them (`cu_seqlens`): those of the step are not taken."""
    token = _LOCAL.set(True)
    try:
        yield
    finally:
        _LOCAL.reset(token)
