"""The order in which the micro-batches of a step go forward and backward.

In: how many there are, and what the script says of their order. Out: a list of turns, `("F", (0,))` for micro-batch 0
forward, `("F", (0, 1))` for two that go through each layer together. It knows no layers and no step.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

Turn = tuple[str, tuple[int, ...]]
"""`F` or `B`, and a micro-batch, or several that go through each layer together."""
Turns: TypeAlias = int | str | Callable[[int], str] | None
"""How many micro-batches may be forward whose backward has not come (by default one); an order, `F0 F1 B0 B1` or
`F0+1 B1+0`; or a function that makes one, of the number of micro-batches."""


def order_of(turns: Turns, count: int) -> list[Turn]:
    """The turns of `count` micro-batches."""
    if turns is None or isinstance(turns, int):
        return _ahead(1 if turns is None else turns, count)
    told = turns if isinstance(turns, str) else turns(count)
    order: list[Turn] = []
    for word in told.split():
        if not re.fullmatch(r"[FB][0-9]{1,5}(\+[0-9]{1,5})*", word):
            raise ValueError(
                f"turns {told!r}: {word!r} is no turn; write F0 for micro-batch 0 forward, B0 backward, F0+1 for two "
                "together"
            )
        order.append((word[0], tuple(int(it) for it in word[1:].split("+"))))
    forwards, backwards = ([at for way, these in order if way == it for at in these] for it in "FB")
    if forwards != list(range(count)) or sorted(backwards) != forwards:
        raise ValueError(
            f"turns {told!r}: the step has {count} micro-batches; each goes forward once, in their order, and backward "
            "once. Where steps differ in how many they have, give a function of that number"
        )
    for at in backwards:
        if next(way for way, these in order if at in these) == "B":
            raise ValueError(f"turns {told!r}: B{at} comes before F{at}; a micro-batch goes forward first")
    return order


def _ahead(most: int, count: int) -> list[Turn]:
    """One forward and one backward in turn, with at most `most` micro-batches between forward and backward."""
    if most < 1:
        raise ValueError(f"turns is {most}; 1 micro-batch or more is in flight")
    order: list[Turn] = []
    for at in range(count + most):
        order += [("F", (at,))] * (at < count) + [("B", (at - most + 1,))] * (0 <= at - most + 1 < count)
    return order


def in_words(order: list[Turn]) -> str:
    return " ".join(f"{way}{'+'.join(str(at) for at in these)}" for way, these in order)
