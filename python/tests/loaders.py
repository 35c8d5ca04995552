"""Loaders of numbers, for tests of `cadre.batches`: what else iterators may do at an end, or when a loop begins."""


class Loader:
    """Numbers, and where it stands."""

    def __init__(self, count: int) -> None:
        self.count, self.drawn = count, 0

    def __iter__(self):
        while self.drawn < self.count:
            self.drawn += 1
            yield self.drawn - 1
        self.drawn = 0

    def state_dict(self) -> dict:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        self.drawn = state["drawn"]


class Stream:
    """Numbers, each once."""

    def __init__(self, count: int) -> None:
        self.count, self.drawn = count, 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.drawn == self.count:
            raise StopIteration
        self.drawn += 1
        return self.drawn - 1


class Resets(Stream):
    """Begins again after its end."""

    def __next__(self) -> int:
        try:
            return super().__next__()
        except StopIteration:
            self.drawn = 0
            raise


class Rewinds(Stream):
    """Begins again with each loop."""

    def __iter__(self):
        self.drawn = 0
        return self


class Again:
    """Another loader, which nobody sees behind it."""

    def __init__(self, loader) -> None:
        self.loader = loader

    def __iter__(self):
        yield from self.loader
