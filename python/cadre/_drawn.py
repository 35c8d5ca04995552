"""Batches that were drawn from a loader, until steps have begun with them.

In: an iterator, and what says the documents of a batch. Out: the updates of an epoch in order, each batch once,
whatever exception comes between. Errors of the loader are its own. A loop that is left leaves the update that was drawn
ahead here: the next loop over the same iterator begins with it.
"""

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ._layout import Layout


class LoaderEndedError(RuntimeError):
    """The loader raised an exception, then ended. No mistake of the script: another attempt may get further."""


class Taken:
    """A batch, the loader's state after it, and its documents, which are asked for once."""

    def __init__(self, batch: Any, state: Any = None) -> None:
        self.batch, self.state = batch, state
        self.layout: list[Any] | None = None


class Drawn:
    """See the module."""

    def __init__(self, loader: Any, iterator: Iterator[Any]) -> None:
        self.loader, self.iterator = loader, iterator
        # The loops that draw from the iterator.
        self.feeds: weakref.WeakSet[Any] = weakref.WeakSet()
        # Batches that are left of the current update, of the next one, and of the one behind it.
        self.left: deque[Taken] = deque()
        self.held: list[Taken] = []
        self.after: list[Taken] = []
        self.is_first, self.count = True, 0
        self.state: Any = None
        """That of the loader after the batch handed out; behind the last one of an epoch, after its end."""
        self.has_ended = False
        self._state_at_end: Any = None
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
        """The loop over the epoch ends."""
        self.state = self._state_at_end

    def hand_out(self) -> Any:
        taken = self.left.popleft()
        self.state = taken.state
        return taken.batch

    def draw(self, into: list[Taken], count: int) -> None:
        """Draws an update, or what it lacks; at the end of the loader, the batches that are left."""
        # Asked again at its end, a loader may begin anew.
        while len(into) < count and not self.has_ended:
            try:
                batch = next(self.iterator)
            except StopIteration:
                self.has_ended = True
                self._state_at_end = self._loader_state()
                self._refuse_broken()
            except BaseException as error:
                self._broke = f"{type(error).__name__}: {error}"
                raise
            else:
                self._broke = None
                into.append(Taken(batch, self._loader_state()))

    def layouts(self, update: list[Taken], layout: Callable[[Any], Layout]) -> list[list[Any]]:
        """Documents of an update's batches."""
        for it in update:
            if it.layout is None:
                it.layout = list(layout(it.batch))
        return [it.layout for it in update if it.layout is not None]

    def _loader_state(self) -> Any:
        # Copied, since a loader may change the state that it returned.
        return copy.deepcopy(self.loader.state_dict()) if hasattr(self.loader, "state_dict") else None

    def _refuse_broken(self) -> None:
        broke, self._broke = self._broke, None
        if broke is not None:
            raise LoaderEndedError(
                f"batches: {type(self.loader).__name__} ended at the call after it raised {broke}. A generator that "
                "raised is over, so batches of the epoch may be missing; let the exception end the job, or give a "
                "loader whose `next` goes on after it"
            )


class Iterators:
    """Loaders of a job that are iterators and may have been drawn from ahead."""

    def __init__(self) -> None:
        self._known: list[Drawn] = []

    def of(self, loader: Any) -> Drawn | None:
        """What was drawn from a loader that is an iterator, and waits."""
        return next((it for it in self._known if it.loader is loader and it.waiting), None)

    def open(self, loader: Any) -> Drawn:
        """Begins an epoch of a loader, or goes on with what was drawn ahead."""
        before = self.of(loader)
        if before and not _keeps_its_place(loader):
            # It may have begun anew by `iter`.
            raise ValueError(f"batches: {_lost(before)}, and another loop over it begins; {_REMEDY}")
        iterator = iter(loader)
        if before:
            return before
        drawn = Drawn(loader, iterator)
        if drawn.is_iterator:
            self._known.append(drawn)
        return drawn

    def refuse_lost(self, begins: Drawn) -> None:
        """Refuses a step of another loader where nothing is left that would hand out what was drawn ahead."""
        self._known = [it for it in self._known if it.feeds or it.waiting]
        for it in self._known:
            if it is not begins and not it.feeds and _keeps_its_place(it.loader):
                raise ValueError(f"batches: {_lost(it)}, and a loop over another loader begins; {_REMEDY}")


_REMEDY = "keep what `batches` returned and loop over it again, or let its loop end (itertools.islice(loader, count))"


def _lost(drawn: Drawn) -> str:
    return f"{drawn.waiting} batches were drawn ahead from a {type(drawn.loader).__name__} whose loop was left"


def _itself(self: Any) -> Any:
    return self


def _keeps_its_place(iterator: Any) -> bool:
    """Whether `iter` of an iterator surely begins nothing anew."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return type(iterator).__module__ in ("builtins", "itertools") or (
        code is not None and code.co_code == _itself.__code__.co_code
    )
