"""The job of this process: which step runs, what was announced for it, whose turn it is.

In: a model's shape, and which documents the batches hold. Out: steps that have begun, or computing in this process
where there is no job. One process is one rank of one job, so there is one `Job`.

What the session cannot know (kinds of layers, boundaries of documents) and whose turn it is are checked before anything
is sent, so that a step goes on after a refusal. An exception that ends the process ends the job everywhere with it. A
forked child is no rank: its calls are refused.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import _place
from ._drawn import Loaders
from ._epochs import Epochs
from ._finite import NotFinite
from ._frozen import with_frozen
from ._layout import Layout, Shape, Stretch, is_layout, name_layers, rows_of, stretches_of
from ._local import under_local
from ._mistakes import BAD_INPUT, check_numbers, is_mistake, names_rank
from ._native import Session, close_sockets, exit_with, give_sigterm_back, leave_code_in
from ._step import Step
from ._turns import Turn, Turns, order_of


class Job:
    """See the module."""

    def __init__(self, shape: Shape, session: Session | None, steps: int) -> None:
        self.shape, self.session, self.steps = shape, session, steps
        self.rank, self.ranks = (session.rank, session.ranks) if session else (0, 1)
        self.process = os.getpid()
        self.next = 0
        # Held from the look at whose turn it is until the phase is submitted: calls may come from several threads.
        self.turn = threading.Lock()
        self.running: Step | None = None
        self.ended = False
        # Whether it was asked to stop. Then the session goes on until the script ends, which may save first.
        self.stopped = self.left = False
        # Whether this process ends.
        self.exits = False
        # Layouts and turns of the next step, if they were announced.
        self.announced: tuple[list[list[Stretch]], list[Turn]] | None = None
        # The type of rows on the wire, and whether rows are refused that would lose bits to it unasked.
        self.wire = getattr(torch, session.wire) if session else None
        self.refuses_wider = session is not None and session.wire_is_open and self.wire == torch.bfloat16
        self.not_finite = NotFinite(session)
        self.epochs, self.loaders = Epochs(self.rank, self.ranks), Loaders()

    def check_process(self) -> None:
        """Refuses a forked process: it has the memory of a rank, but not its threads."""
        if os.getpid() != self.process:
            raise RuntimeError(
                f"this process was forked from rank {self.rank}, which alone is in the job; call cadre there, "
                "or evaluate here under cadre.local()"
            )

    def stretches(self, layouts: Layout | Sequence[Layout]) -> list[list[Stretch]]:
        """Stretches by micro-batch. Documents that are whole on a rank get numbers that no other rank uses."""
        told: list[Any] = list(layouts)
        several = told and all(is_layout(it) for it in told)
        return [stretches_of(it, self.rank, self.ranks) for it in (told if several else [told])]

    def announce(self, step: int, layouts: list[list[Stretch]], order: list[Turn]) -> None:
        told = [
            (
                list(dict.fromkeys((it.document, it.rows) for it in layout)),
                [(it.document, it.start, it.end) for it in layout],
            )
            for layout in layouts
        ]
        has_backward = self.shape.frozen < len(self.shape.kinds)
        turns = [(way, list(these)) for way, these in order if has_backward or way == "F"]
        self.session.announce(step, told, turns, self.shape.frozen)
        self.announced = layouts, order

    def begin(
        self,
        layouts: Layout | Sequence[Layout],
        following: Layout | Sequence[Layout] | None,
        turns: Turns = None,
    ) -> bool:
        """Ends the step that runs and begins the next one; returns whether there is one."""
        if self.stopped or self.steps == 0:
            return False
        if self.ended:
            raise RuntimeError(f"rank {self.rank}: the job has ended; leave the loop when begin_step returns False")
        if missing := self.missing():
            raise RuntimeError(missing)
        if self.next == self.steps:
            self.end_step()
            return self.end()
        # Refused before the last step ends and this one begins, so that a script that catches it may go on.
        stretches = self.stretches(layouts)
        order = order_of(turns, len(stretches))
        if self.announced is not None and self.announced != (stretches, order):
            raise ValueError(
                f"rank {self.rank}: step {self.next} was announced with {self.announced} and begins with "
                f"{stretches, order}; give begin_step the layouts that were `next` before, and the same turns; after "
                "a loop that was left, loop over the same `batches` again, or end it by itertools.islice(loader, count)"
            )
        after = self.stretches(following) if following is not None and self.next + 1 < self.steps else None
        order_after = order_of(turns, len(after)) if after else []
        self.end_step()
        if self.session:
            if self.announced is None:
                self.announce(self.next, stretches, order)
            if (state := self.session.begin(self.next)) != "step":
                return self.leave(state)
            self.announced = None
            if after is not None:
                self.announce(self.next + 1, after, order_after)
        where, pooled = (self.rank, self.next), self.session is not None
        self.running = Step(where, self.shape, stretches, pooled=pooled, order=order)
        self.next += 1
        return True

    def missing(self) -> str | None:
        """What the current step still lacks."""
        return self.running.unfinished() if self.running else None

    def unfinished(self) -> str | None:
        """What the job still lacks."""
        if (missing := self.missing()) is None and self.next < self.steps:
            return (
                f"rank {self.rank} left after {self.next} of {self.steps} steps; give every rank the same `steps`, and "
                "loaders that last"
            )
        return missing

    def end_step(self) -> None:
        if (step := self.running) and self.session:
            tokens = step.rows() * self.ranks if step.tokens is None else step.tokens
            self.session.done(
                step.number,
                loss=step.loss,
                gradient_norm=step.gradient_norm,
                learning_rate=step.learning_rate,
                validation_loss=step.validation_loss,
                tokens=tokens,
                seconds=time.monotonic() - step.began,
            )
        self.running = None

    def end(self) -> bool:
        """Ends the last step and leaves the job."""
        state = self.session.begin(self.steps) if self.session else "completed"
        return self.leave("completed" if state == "step" else state)

    def leave(self, how: str, *, for_good: bool = False) -> bool:
        """`for_good`: another attempt would fail in the same way."""
        if not self.ended:
            self.ended = True
            if how == "stopped":
                self.stopped = True
            elif self.session:
                self.go(how, for_good=for_good)
        return False

    def close(self, how: str = "stopped", *, for_good: bool = False) -> None:
        """Leaves a job that was asked to stop, once."""
        if self.stopped and self.session and not self.left:
            self.go(how, for_good=for_good)

    def go(self, how: str, *, for_good: bool) -> None:
        """Leaves the session. From then on SIGTERM is the script's again, if that goes on."""
        self.left = True
        self.session.leave(how, for_good=for_good)
        if not self.exits:
            give_sigterm_back()

    def fail(self, error: BaseException | None) -> None:
        """Leaves the job with the exception that ends this process."""
        own = self.unfinished() or "its process ended; call cadre.finish() at the end"
        where = f"step {self.running.number}" if self.running else f"before step {self.next}"
        told = str(error) if error else own
        for named in (f"rank {self.rank}, {where}: ", f"rank {self.rank}: "):
            told = told.removeprefix(named)
        why = ": ".join(filter(None, (type(error).__name__, told))) if error else told
        leave = self.close if self.stopped else self.leave
        leave(f"rank {self.rank}, {where}: {why}", for_good=is_mistake(error) and not self.stopped)

    def at_exit(self) -> None:
        """Fails the job if this rank exits in the middle, so that no other rank waits for it."""
        if os.getpid() != self.process:
            return
        self.exits, error = True, getattr(sys, "last_value", None)
        if not self.ended or (self.stopped and error):
            self.fail(error)
        self.close()

    def in_child(self) -> None:
        """Called after a fork: keeps the session from being dropped, which would wait for threads of the parent, and
        closes its sockets, so that the parent's end is seen. And SIGTERM does what the script says, or ends it: a
        rank's handler needs a thread that only the parent has."""
        with contextlib.suppress(ValueError):  # a fork by another thread than the main one
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        if self.session:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))
            # Of a rank that has left, their ports may be the script's by now.
            if not self.left:
                close_sockets()

    def backward_phase(self, number: int) -> tuple[Step, int, int]:
        """Step, micro-batch and layer of a forward's ticket; refuses what is not the next backward, before anything is
        sent."""
        self.check_process()
        key, layer = divmod(number, len(self.shape.kinds))
        step, (of, at) = self.running, Step.of_key(key)
        if step is None or step.number != of:
            now = f"step {step.number} runs" if step else "no step runs"
            raise RuntimeError(
                f"rank {self.rank}: backward of step {of}, layer {layer}, while {now}; call backward before the next "
                "step"
            )
        step.backward_phase(at, layer)
        return step, at, layer


_JOB: Job | None = None
# Looked up once: each call of attention asks.
_IS_CHECKED = "CADRE_CHECK" in os.environ


# A rank of a launcher such as torchrun, which exits with a code of its own. What this process starts is no rank.
if (_CODES := os.environ.pop("CADRE_CODES", None)) and "RANK" in os.environ:
    leave_code_in(f"{_CODES}/{os.environ['RANK']}")


@atexit.register
def _at_exit() -> None:
    """Before `init` has joined, too: the exit code says whether another attempt would help."""
    if _JOB is not None:
        _JOB.at_exit()
    elif "CADRE_CONTROL" in os.environ and is_mistake(getattr(sys, "last_value", None)):
        exit_with(BAD_INPUT)
        print(f"error: {type(sys.last_value).__name__}: {sys.last_value}", file=sys.stderr)


def current() -> Job | None:
    """The job of this process, if `init` was called."""
    return _JOB


def is_joined() -> bool:
    """Whether this process is a rank of a job."""
    return _JOB is not None and _JOB.session is not None


def running() -> Step | None:
    """The step that runs, on the pool or in this process."""
    return _JOB.running if _JOB else None


def pooled() -> tuple[Job, Step] | None:
    """The job and its step, if a call is to be computed on the pool."""
    if _JOB is None or _JOB.session is None or _JOB.running is None or under_local():
        return None
    _JOB.check_process()
    return _JOB, _JOB.running


def before_steps() -> Job | None:
    """The job whose first step has not begun, if a call is to be computed here in spite of it."""
    begun = _JOB is None or _JOB.session is None or _JOB.ended or _JOB.next > 0
    return None if begun or under_local() else _JOB


@names_rank
def init(
    model: Any,
    *,
    steps: int,
    seed: int = 0,
    threads: int | None = None,
    on_nonfinite: str = "report",
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> None:
    """Joins the job that started this process, once, with the layers of `model` (of transformers, or a `Shape`).

    Every rank gives the same model, `steps` and `seed`. With 0 steps, as a resume may have left, the job ends well at
    once, and loops over `batches` have no batch. `threads` compute in place (default: as many as torch has).
    `on_nonfinite`: results of the pool that are not finite are passed on and reported (`report`), or `end` the job.
    `dtype`: that of Q, K and V, which travel in it unless the job says another (default: autocast's if `init` is under
    it, else that of the model's parameters).
    `device`: where this process computes what a plan gives it and what lost servers leave (default: on the GPU where
    the model's parameters are, or that of a `Shape` on torch's current one, if it has kernels for such rows).
    In a process that no job has started, attention is computed here, which is said once on stderr.
    """
    global _JOB
    if _JOB is not None:
        raise RuntimeError("init was called before; a process is one rank of one job")
    check_numbers(steps, on_nonfinite, seed=seed, threads=threads or 0)
    if (restarts := os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0":
        raise ValueError(
            f"init: torchrun restarts ranks by itself, {restarts} times; leave --max-restarts out, and set "
            "spec.failurePolicy.maxRestarts"
        )
    rows = rows_of(model, dtype)
    shape, session = with_frozen(model, Shape.of(model)), None
    check()
    if "CADRE_CONTROL" in os.environ:
        session = Session.join(
            kinds=list(map(str, shape.kinds)),
            heads=shape.heads,
            steps=int(steps),
            seed=seed,
            threads=threads or torch.get_num_threads(),
            on_nonfinite=on_nonfinite,
            rows=rows and str(rows).removeprefix("torch."),
            gpu=_place.computes_on(device, model, rows, [dim for *_, dim in shape.heads]),
        )
        name_layers(model)
    else:
        print("cadre: no job has started this process; core attention is computed here", file=sys.stderr)
    _JOB = Job(shape, session, int(steps))
    os.register_at_fork(after_in_child=_JOB.in_child)
    if steps == 0:
        print("cadre: no step is left to train; the job ends well", file=sys.stderr)
        _JOB.end()


def check() -> Any:
    """The check that tries this job, if `cadre check` started it."""
    if not _IS_CHECKED:
        return None
    from . import _check

    return _check.current()


def joined(what: str) -> Job:
    if _JOB is None:
        raise RuntimeError(f"{what} was called before cadre.init")
    _JOB.check_process()
    return _JOB


@names_rank
def begin_step(
    layouts: Layout | Sequence[Layout],
    next: Layout | Sequence[Layout] | None = None,  # noqa: A002
    *,
    turns: Turns = None,
) -> bool:
    """Ends the step that runs, if any, and begins the one that holds these documents; `False` where the job is over.

    `layouts` is a layout, or a list of one for each micro-batch. `next` is that of the step after it, which is planned
    meanwhile; without it the next step begins with a round trip. `turns` says in which order micro-batches go forward
    and backward, by default one after the other: how many may be in flight, or `F0 F1 B0 B1`, or a function of their
    number. It is that of both steps.
    """
    return joined("begin_step").begin(layouts, next, turns)


@names_rank
def next_micro_batch() -> None:
    """Further calls belong to the step's next micro-batch."""
    if (step := joined("next_micro_batch").running) is None:
        raise RuntimeError("next_micro_batch was called outside of a step")
    step.advance()


@names_rank
def finish() -> None:
    """Ends the last step and leaves the job. `batches` does it by itself; a job that has steps left fails. While an
    exception is under way, as in `finally`, the job fails with it. A job that was asked to stop is left when the
    process ends: what the script says of its checkpoint until then is heard."""
    job, error = joined("finish"), sys.exc_info()[1]
    if isinstance(error, SystemExit) and not error.code:
        error = None
    if job.ended:
        return job.fail(error) if job.stopped and error else None
    if reason := job.unfinished():
        if error:
            return job.fail(error)
        job.leave(reason, for_good=True)
        raise RuntimeError(f"finish: {reason}")
    job.end_step()
    job.end()
