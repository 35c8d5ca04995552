"""What ranks and programs of the tests say of a call that must be refused.

In: words of the error, the call. Out: an exception where the call succeeds, or fails with other words. `make gpu-check`
packs it.
"""

from collections.abc import Callable


def refused(words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        assert words in str(error), f"{words!r} is not in: {error}"
    else:
        raise AssertionError(f"not refused: {words}")
