"""The batches of a loader, as steps of the job: an update is held back, so that its documents are announced early.

In: a loader, and what says the documents of its batches. Out: its batches, the state of the loader as of each. Errors
of the loader are its own.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from . import _job
from ._layout import Layout, lengths_of
from ._mistakes import names_rank
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
        self._iterator: Iterator[Batch] | None = None
        self._is_first, self._count = True, 0
        # Batches that are left of the current update, of the next one, and of the one behind it, each with the loader's
        # state after it. They stay here until a step has begun with them, whatever exception comes before.
        self._left: deque[tuple[Batch, Any]] = deque()
        self._held: list[tuple[Batch, Any]] = []
        self._after: list[tuple[Batch, Any]] = []
        self._state: Any = None

    def __iter__(self) -> "Batches[Batch]":
        return self

    @names_rank
    def __next__(self) -> Batch:
        job = _job.joined("batches")
        if self._left:
            _job.next_micro_batch()
        else:
            self._begin(job)
        batch, self._state = self._left.popleft()
        return batch

    @property
    def is_last(self) -> bool:
        """Whether the batch handed out is the last of its update: the time for `optimizer.step()`."""
        return not self._left

    @property
    def micro_batches(self) -> int:
        """Batches of the current update: the number to divide by for a mean over it."""
        return self._count

    @names_rank
    def state_dict(self) -> Any:
        """State of the loader after the batch handed out: a resume repeats the batches that were drawn later."""
        return self._loader_state() if self._state is None else self._state

    @names_rank
    def load_state_dict(self, state: Any) -> None:
        """Resumes after the batch that was handed out when the state was taken. Call it before the first batch."""
        if self._iterator is not None:
            raise RuntimeError("batches: load_state_dict was called after the first batch; call it before the loop")
        if not hasattr(self._loader, "load_state_dict"):
            raise TypeError(f"batches: {self._without('load_state_dict')}")
        self._loader.load_state_dict(state)
        self._state = state

    def _begin(self, job: _job.Job) -> None:
        """Begins the next step and announces the one after it; `StopIteration` where the loader or the job ends. Called
        again after an exception it loses no batch."""
        if job.ended:
            raise StopIteration
        if self._iterator is None:
            self._iterator, self._is_first = iter(self._loader), True
        if job.next < job.steps:
            if self._is_first:
                self._draw(self._held)
            if not self._held:
                # The next loop is the next epoch.
                self._iterator = None
                raise StopIteration
            job.epochs.step(job.next, is_first=self._is_first)
            self._is_first = False
            if job.next + 1 < job.steps:
                self._draw(self._after)
        told: list[list[Any]] = [[list(self._layout(batch)) for batch, _ in it] for it in (self._held, self._after)]
        if not job.begin(told[0], told[1] or None, self._turns):
            raise StopIteration
        self._left.extend(self._held)
        self._count = len(self._held)
        self._held, self._after = self._after, []

    def _draw(self, drawn: list[tuple[Batch, Any]]) -> list[tuple[Batch, Any]]:
        """Draws an update, or what it lacks; at the end of the loader, the batches that are left."""
        stated = hasattr(self._loader, "state_dict")
        while len(drawn) < self._accumulate:
            try:
                batch = next(self._iterator)
            except StopIteration:
                break
            # Copied, since a loader may change the state that it returned.
            drawn.append((batch, copy.deepcopy(self._loader.state_dict()) if stated else None))
        return drawn

    def _loader_state(self) -> Any:
        if not hasattr(self._loader, "state_dict"):
            raise TypeError(f"batches: {self._without('state_dict')}")
        return self._loader.state_dict()

    def _without(self, what: str) -> str:
        return f"{type(self._loader).__name__} has no {what}; take torchdata's StatefulDataLoader"


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
    with an update of the batches that are left; the next call goes on with the next epoch. The loop ends early when
    the job was asked to stop. `turns` is that of `begin_step`: with `turns=2` the next batch goes forward before the
    backward of the one before.
    """
    _job.joined("batches")
    if accumulate < 1 or accumulate != int(accumulate):
        raise ValueError(f"batches: accumulate is {accumulate}; an update has 1 batch or more")
    if check := _job.check():
        from ._check import Checked

        return Checked(check, loader, layout, accumulate, turns)
    return Batches(loader, layout, accumulate, turns)
