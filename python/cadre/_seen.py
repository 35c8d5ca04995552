"""What the script has seen of its loaders, of which `batches` draws more than it has handed out.

In: loaders. Out: for each the state that it would have without the batches drawn ahead, and whether there are any.
A state that a loader cannot give is an error of the script only where it asks for it.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any


class State:
    """A state of a loader, or why it has none."""

    def __init__(self, loader: Any) -> None:
        self._value: Any = None
        self._none: str | None = None
        try:
            if hasattr(loader, "state_dict"):
                # Copied, since a loader may change the state that it returned.
                self._value = copy.deepcopy(loader.state_dict())
            else:
                self._none = "has no state_dict"
        except Exception as error:
            self._none = f"has no state: {type(error).__name__}: {error}"

    @staticmethod
    def of(value: Any) -> "State":
        """One that a loader was given."""
        state = State(None)
        state._value, state._none = value, None
        return state

    def value(self, loader: Any) -> Any:
        if self._none is not None:
            raise TypeError(
                f"batches: {type(loader).__name__} {self._none}; take torchdata's StatefulDataLoader (in Accelerate, "
                "DataLoaderConfiguration(use_stateful_dataloader=True))"
            )
        return self._value


class Seen:
    """What the script has seen of a loader."""

    def __init__(self) -> None:
        self.state: State | None = None
        """That after the batch handed out last, or after the end of its epoch; none before the first loop."""
        self.ahead = 0
        """Batches of an iterator that were drawn and not handed out."""


class ByLoader:
    """What was seen of each loader, as long as that lives."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Callable[[], Any], Seen]] = {}

    def of(self, loader: Any) -> Seen:
        key = id(loader)
        of, seen = self._seen.get(key, (lambda: None, Seen()))
        if of() is not loader:
            seen = Seen()
            try:
                of = weakref.ref(loader, lambda _: self._seen.pop(key, None))
            except TypeError:
                if type(loader).__module__ in ("builtins", "itertools"):
                    # These have no state.
                    return seen
                of = lambda: loader  # noqa: E731
            self._seen[key] = of, seen
        return seen
