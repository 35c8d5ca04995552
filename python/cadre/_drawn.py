"""Batches that were drawn from a loader, until steps have begun with them.

In: an iterator, and what says the documents of a batch. Out: the updates of an epoch in order, each batch once,
whatever exception comes between. Errors of the loader are its own. A loop that is left leaves the update that was drawn
ahead here: the next loop over the same iterator begins with it.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ._layout import Layout
from ._seen import ByLoader, Seen, State


class LoaderEndedError(RuntimeError):
    """The loader raised an exception, then ended. No mistake of the script: another attempt may get further."""


class Taken:
    """A batch, the loader's state after it, and its documents, which are asked for once."""

    def __init__(self, batch: Any, state: State | None = None) -> None:
        self.batch, self.state = batch, state
        self.layout: list[Any] | None = None


class Drawn:
    """See the module."""

    def __init__(self, loader: Any, iterator: Iterator[Any], seen: Seen) -> None:
        self.loader, self.iterator, self._seen = loader, iterator, seen
        # The loops that draw from the iterator.
        self.feeds: weakref.WeakSet[Any] = weakref.WeakSet()
        # Batches that are left of the current update, of the next one, and of the one behind it.
        self.left: deque[Taken] = deque()
        self.held: list[Taken] = []
        self.after: list[Taken] = []
        self.is_first, self.count = True, 0
        self.has_ended = False
        self._state_at_end: State | None = None
        # The exception of the loader, if the last draw raised one.
        self._broke: str | None = None

    @property
    def is_iterator(self) -> bool:
        """Whether the loader is an iterator: what another loop over it draws comes behind what was drawn."""
        return self.iterator is self.loader

    @property
    def waiting(self) -> int:
        """Batches that were drawn and not handed out."""
        return len(self.left) + len(self.held) + len(self.after)

    @property
    def is_over(self) -> bool:
        """Whether the loader has ended and all of its batches were handed out."""
        return self.has_ended and not self.waiting

    def end(self) -> None:
        """The script sees the end, if it is over."""
        if self.is_over:
            self._seen.state = self._state_at_end

    def look_for_end(self) -> None:
        """No step comes any more. If the last one was the last of its epoch, too, the script has seen the end."""
        # Accelerate's loaders know by themselves, and some draw on all ranks together.
        looks = not self.is_iterator and hasattr(self.loader, "state_dict")
        looks = looks and not hasattr(self.loader, "end_of_dataloader")
        if looks and not self.waiting and not self.has_ended:
            with contextlib.suppress(Exception):
                self.draw(self.held, 1)
        self.end()

    def hand_out(self) -> Any:
        taken = self.left.popleft()
        self._seen.state = taken.state
        self._count_ahead()
        return taken.batch

    def draw(self, into: list[Taken], count: int) -> None:
        """Draws an update, or what it lacks; at the end of the loader, the batches that are left."""
        # Asked again at its end, a loader may begin anew.
        while len(into) < count and not self.has_ended:
            try:
                batch = next(self.iterator)
            except StopIteration:
                self.has_ended, self._state_at_end = True, State(self.loader)
                self._refuse_broken()
            except BaseException as error:
                self._broke = f"{type(error).__name__}: {error}"
                raise
            else:
                self._broke = None
                into.append(Taken(batch, State(self.loader)))
                self._count_ahead()

    def layouts(self, update: list[Taken], layout: Callable[[Any], Layout]) -> list[list[Any]]:
        """Documents of an update's batches."""
        for it in update:
            if it.layout is None:
                it.layout = list(layout(it.batch))
        return [it.layout for it in update if it.layout is not None]

    def _count_ahead(self) -> None:
        self._seen.ahead = self.waiting if self.is_iterator else 0

    def _refuse_broken(self) -> None:
        broke, self._broke = self._broke, None
        if broke is not None:
            raise LoaderEndedError(
                f"batches: {type(self.loader).__name__} ended at the call after it raised {broke}. A generator that "
                "raised is over, so batches of the epoch may be missing; let the exception end the job, or give a "
                "loader whose `next` goes on after it"
            )


class Loaders:
    """The loaders of a job."""

    def __init__(self) -> None:
        self._seen = ByLoader()
        # What was drawn from iterators that another loop goes on with.
        self._kept: list[Drawn] = []

    def seen(self, loader: Any) -> Seen:
        return self._seen.of(loader)

    def open(self, loader: Any) -> Drawn:
        """Begins an epoch of a loader, or goes on with what was drawn ahead."""
        if before := next((it for it in self._kept if it.loader is loader and it.waiting), None):
            return before
        seen = self.seen(loader)
        if seen.ahead:
            # It may begin anew by `iter`.
            raise ValueError(f"batches: {_lost(loader, seen.ahead)}, and another loop over it begins; {_REMEDY}")
        seen.state = seen.state or State(loader)
        drawn = Drawn(loader, iter(loader), seen)
        if drawn.is_iterator and _keeps_its_place(loader):
            self._kept.append(drawn)
        return drawn

    def refuse_lost(self, begins: Drawn) -> None:
        """Refuses a step of another loader where nothing is left that would hand out what was drawn ahead."""
        self._kept = [it for it in self._kept if it.feeds or it.waiting]
        for it in self._kept:
            if it is not begins and not it.feeds:
                raise ValueError(
                    f"batches: {_lost(it.loader, it.waiting)}, and a loop over another loader begins; {_REMEDY}"
                )


_REMEDY = "keep what `batches` returned and loop over it again, or let its loop end (itertools.islice(loader, count))"


def _lost(loader: Any, count: int) -> str:
    return f"{count} batches were drawn ahead from a {type(loader).__name__} whose loop was left"


def _itself(self: Any) -> Any:
    return self


def _keeps_its_place(iterator: Any) -> bool:
    """Whether `iter` of an iterator surely begins nothing anew."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return type(iterator).__module__ in ("builtins", "itertools") or (
        code is not None and code.co_code == _itself.__code__.co_code
    )
