"""What ranks and programs of the tests say of a call that must be refused.

In: words of the error, the call. Out: an exception where the call succeeds, or fails with other words. `make gpu-check`
packs it.
"""

import os
from collections.abc import Callable


def refused(words: str, call: Callable[[], object], *, rank: str | None = None) -> None:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        assert words in str(error), f"{words!r} is not in: {error}"
        assert rank is None or str(error).count(f"rank {rank}") == 1, f"rank {rank} is not named once in: {error}"
    else:
        raise AssertionError(f"not refused: {words}")


def mistaken(words: str, call: Callable[[], object]) -> None:
    """In a job the package names the rank."""
    refused(words, call, rank=os.environ["RANK"])
