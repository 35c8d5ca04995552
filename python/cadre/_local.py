"""Whether calls of attention are computed in this process, whatever step runs.

In: `local()` of the script. Out: what calls ask. It knows no job.

The script's threads and coroutines each have a value of their own; a new thread is not under `local()`. A thread of
autograd's, such as that of a GPU, has none: there the value is that of the thread that called backward, which torch
hands on with its own settings of threads.
"""

import contextlib
import contextvars
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class _Said(NamedTuple):
    local: bool = False
    whole: bool = False
    thread: int = 0


_NOTHING = _Said()
_KEY = "cadre.local"
_OPEN: set[object] = set()
"""One for each `local()` that has begun and not ended, in whatever thread."""
_SAID: contextvars.ContextVar[_Said | None] = contextvars.ContextVar(_KEY, default=None)


def _said() -> _Said:
    if (said := _SAID.get()) is not None:
        return said
    said = _handed_on()
    # Said in this thread, it is another coroutine's.
    return _NOTHING if said.thread == threading.get_ident() else said


def _handed_on() -> _Said:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else _NOTHING


def stash_of_torch() -> Callable[[object], None]:
    """Torch's function that keeps an object for this thread. That of torch 2.9 gives a reference back that it has not
    taken: there each object gets one more."""
    stash, tried = torch._C._stash_obj_in_tls, object()
    counted = sys.getrefcount(tried)
    stash(f"{_KEY} tried", tried)
    if sys.getrefcount(tried) > counted:
        return functools.partial(stash, _KEY)

    def kept(it: object) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(it))
        stash(_KEY, it)

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tried))
    return kept


_stash = stash_of_torch()


def under_local() -> bool:
    """Whether the call is under `local()`."""
    return _said().local


def elsewhere() -> str:
    """What a refusal adds whose remedy is `local()`, where another thread or coroutine is under it."""
    if not _OPEN or under_local():
        return ""
    return "; cadre.local() counts in the thread or coroutine that calls, and another is under it"


def says_whole() -> bool:
    """Whether the call is under `local(whole=True)`."""
    return _said().whole


@contextlib.contextmanager
def local(*, whole: bool = False) -> Iterator[None]:
    """Attention inside is computed in this process, whatever step runs: for evaluation. Documents lie whole on the
    rank, and every call says them (`cu_seqlens`): those of the step are not taken. Lengths of what was packed or
    announced with parts of documents are refused, unless `whole` says that these are other documents."""
    said, before = _Said(True, whole or says_whole(), threading.get_ident()), _handed_on()
    token, open_here = _SAID.set(said), object()
    _stash(said)
    _OPEN.add(open_here)
    try:
        yield
    finally:
        _OPEN.discard(open_here)
        _stash(before)
        _SAID.reset(token)
