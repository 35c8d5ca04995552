"""Exceptions of the package that tell of a mistake in the script or its input, which another attempt would repeat.

In: exceptions, arguments of `init`. Out: whether the exception that ends a process is a mistake; the rank, in the words
of those that calls of the package raise. One is a mistake if the package itself raised it by a `raise`, or its native
half refused what it was given; an error of torch inside the package, as when memory is short, is none.
"""

import dis
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from ._local import elsewhere
from ._native import RefusedError

BAD_INPUT = 2
"""The exit code of a process that ends by a mistake: its job is not started again."""

_PACKAGE = Path(__file__).parent
_RAISE = dis.opmap["RAISE_VARARGS"]
_KINDS = (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, ImportError)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def is_mistake(error: BaseException | None) -> bool:
    """See the module."""
    if isinstance(error, RefusedError):
        return True
    if type(error) not in _KINDS or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    return Path(code.co_filename).parent == _PACKAGE and code.co_code[last.tb_lasti] == _RAISE


def check_numbers(steps: int, on_nonfinite: str, **counts: int) -> None:
    """Refuses what no job can be joined with."""
    if steps < 0 or steps != int(steps):
        raise ValueError(f"init: steps is {steps}; a job has 1 or more, and 0 where a resume has none left")
    if on_nonfinite not in ("report", "end"):
        raise ValueError(f"init: on_nonfinite is {on_nonfinite!r}; say 'report' or 'end'")
    for name, it in counts.items():
        if not 0 <= it < 1 << 64:
            raise ValueError(f"init: {name} is {it}; give 0 or more")


def names_rank(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Mistakes that `call` raises in a job begin with the rank, if they do not name it themselves; those whose
    remedy is `local()` say if another thread is under it. A call that raises nothing does no more than without."""

    @functools.wraps(call)
    def named(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result:
        try:
            return call(*arguments, **more)
        except _KINDS as error:
            rank = _rank()
            if rank is not None and is_mistake(error) and not re.search(rf"\brank {rank}\b", str(error)):
                error.args = (f"rank {rank}: {error}",)
            if (where := elsewhere()) and "cadre.local()" in str(error) and where not in str(error):
                error.args = (f"{error}{where}",)
            raise

    return named


def _rank() -> str | None:
    """The rank of this process. Before `init` has joined, that which the job has given it."""
    from ._job import current

    if (job := current()) is not None:
        return str(job.rank) if job.session else None
    return os.environ.get("CADRE_INDEX", os.environ.get("RANK")) if "CADRE_CONTROL" in os.environ else None
