"""Exceptions of the package that tell of a mistake in the script or its input, which another attempt would repeat.

In: the exception that ends a process, or arguments of `init`. Out: whether it is one, or such an exception. It is if
the package itself raised it by a `raise`, or its native half refused what it was given; an error of torch inside the
package, as when memory is short, is none.
"""

import dis
from pathlib import Path

from ._native import RefusedError

BAD_INPUT = 2
"""The exit code of a process that ends by a mistake: its job is not started again."""

_PACKAGE = Path(__file__).parent
_RAISE = dis.opmap["RAISE_VARARGS"]
_KINDS = (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, ImportError)


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
