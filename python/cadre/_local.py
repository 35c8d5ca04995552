"""Whether calls of attention are computed in this process, whatever step runs.

In: `local()` of the script. Out: what calls ask. It knows no job.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_LOCAL: contextvars.ContextVar[bool] = contextvars.ContextVar("cadre.local", default=False)
_WHOLE: contextvars.ContextVar[bool] = contextvars.ContextVar("cadre.whole", default=False)


def under_local() -> bool:
    """Whether the call is under `local()`."""
    return _LOCAL.get()


def says_whole() -> bool:
    """Whether the call is under `local(whole=True)`."""
    return _WHOLE.get()


@contextlib.contextmanager
def local(*, whole: bool = False) -> Iterator[None]:
    """Attention inside is computed in this process, whatever step runs: for evaluation. Documents lie whole on the
    rank, and every call says them (`cu_seqlens`): those of the step are not taken. Lengths of what was packed or
    announced with parts of documents are refused, unless `whole` says that these are other documents."""
    tokens = _LOCAL.set(True), _WHOLE.set(whole or _WHOLE.get())
    try:
        yield
    finally:
        _LOCAL.reset(tokens[0])
        _WHOLE.reset(tokens[1])
