"""The batches of a loader, as steps of the job: an update is held back, so that its documents are announced early.

In: a loader, and what says the documents of its batches. Out: its batches, the state of the loader as of each. Errors
of the loader are its own. What was drawn and not handed out is kept by `_drawn`.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, TypeVar

from . import _accelerate, _job
from ._drawn import Drawn
from ._layout import Layout, lengths_of
from ._mistakes import names_rank
from ._seen import State
from ._turns import Turns

Batch = TypeVar("Batch")


class Batches(Generic[Batch]):
    """See `batches`."""

    def __init__(
        self, loader: Iterable[Batch], layout: Callable[[Batch], Layout], accumulate: int, turns: Turns = None
    ) -> None:
        self._layout, self._accumulate, self._turns = layout, accumulate, turns
        # It may have a state.
        self._loader: Any = loader
        # That of the epoch; none between epochs.
        self._drawn: Drawn | None = None
        self._count = 0

    def __iter__(self) -> "Batches[Batch]":
        return self

    @names_rank
    def __next__(self) -> Batch:
        try:
            drawn = self._next(_job.joined("batches"))
        except StopIteration:
            _accelerate.ended(self)
            raise
        self._count = drawn.count
        batch: Batch = drawn.hand_out()
        if drawn.waiting or drawn.has_ended:
            _accelerate.handed_out(self)
        else:
            # Nothing was drawn ahead, as in the job's last step: the loader itself knows whether it has ended.
            _accelerate.ended(self)
        return batch

    @property
    def is_last(self) -> bool:
        """Whether the batch handed out is the last of its update: the time for `optimizer.step()`."""
        return self._drawn is None or not self._drawn.left

    @property
    def micro_batches(self) -> int:
        """Batches of the current update: the number to divide by for a mean over it."""
        return self._count

    @names_rank
    def state_dict(self) -> Any:
        """State of the loader after the batch handed out: a resume repeats the batches that were drawn later. After a
        loop that has ended with its epoch, that at the loader's end."""
        job = _job.joined("batches")
        if self._drawn and job.ended and job.next == job.steps:
            self._drawn.look_for_end()
        return (job.loaders.seen(self._loader).state or State(self._loader)).value(self._loader)

    @names_rank
    def load_state_dict(self, state: Any) -> None:
        """Resumes after the batch that was handed out when the state was taken. Call it before the first batch."""
        seen = _job.joined("batches").loaders.seen(self._loader)
        if self._drawn is not None or seen.ahead:
            raise RuntimeError("batches: load_state_dict was called after the first batch; call it before the loop")
        if not hasattr(self._loader, "load_state_dict"):
            name = type(self._loader).__name__
            raise TypeError(f"batches: {name} has no load_state_dict; take torchdata's StatefulDataLoader")
        self._loader.load_state_dict(state)
        seen.state = State.of(state)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch handed out is the last of its epoch: asked by Accelerate."""
        return self._drawn is not None and self._drawn.is_over

    @property
    def remainder(self) -> int:
        """Samples in the last batch of an epoch, if fewer: asked by Accelerate."""
        return getattr(self._loader, "remainder", -1)

    def _next(self, job: _job.Job) -> Drawn:
        """Where the next batch is, in a step that has begun."""
        drawn = self._drawn or self._open(job)
        if drawn.left:
            _job.next_micro_batch()
        else:
            self._begin(job, drawn)
        return drawn

    def _open(self, job: _job.Job) -> Drawn:
        """Begins an epoch."""
        if job.ended:
            raise StopIteration
        self._drawn = job.loaders.open(self._loader)
        self._drawn.feeds.add(self)
        return self._drawn

    def _begin(self, job: _job.Job, drawn: Drawn) -> None:
        """Begins the next step and announces the one after it; `StopIteration` where the loader or the job ends. Called
        again after an exception it loses no batch."""
        if job.ended:
            raise StopIteration
        job.loaders.refuse_lost(drawn)
        if job.next < job.steps:
            if drawn.is_first:
                drawn.draw(drawn.held, self._accumulate)
            if not drawn.held:
                self._end_epoch(drawn)
            job.epochs.step(job.next, is_first=drawn.is_first)
            drawn.is_first = False
            if job.next + 1 < job.steps:
                drawn.draw(drawn.after, self._accumulate)
        told, after = (drawn.layouts(it, self._layout) for it in (drawn.held, drawn.after))
        if not job.begin(told, after or None, self._turns):
            drawn.end()
            raise StopIteration
        drawn.left.extend(drawn.held)
        drawn.count = len(drawn.held)
        drawn.held, drawn.after = drawn.after, []

    def _end_epoch(self, drawn: Drawn) -> NoReturn:
        """Ends the loop. The next one is the next epoch."""
        is_empty = drawn.is_first and drawn.is_iterator
        drawn.end()
        drawn.feeds.discard(self)
        self._drawn = None
        if is_empty and not hasattr(self._loader, "state_dict"):
            raise ValueError(
                f"batches: a loop begins over a {type(self._loader).__name__} that has ended; an iterator, such as a "
                "generator, has one epoch: give a loader that begins again, or a new one in each epoch"
            )
        raise StopIteration


@names_rank
def batches(
    loader: Iterable[Batch],
    layout: Callable[[Batch], Layout] = lengths_of,
    *,
    accumulate: int = 1,
    turns: Turns = None,
) -> Batches[Batch]:
    """The batches of `loader`, `accumulate` of them a step, as many as the job has steps.

    An update is held back: its documents are announced while the one before runs. Where the loader ends the loop ends,
    with an update of the batches that are left; the next loop goes on with the next epoch. A loop that is left goes on
    where it was in the next one over the same object. The loop ends early when the job was asked to stop. `turns` is
    that of `begin_step`: with `turns=2` the next batch goes forward before the backward of the one before.
    """
    _job.joined("batches")
    if accumulate < 1 or accumulate != int(accumulate):
        raise ValueError(f"batches: accumulate is {accumulate}; an update has 1 batch or more")
    if check := _job.check():
        from ._check import Checked

        return Checked(check, loader, layout, accumulate, turns)
    return Batches(loader, layout, accumulate, turns)
