"""A script as users type it: `scripts/lint types` checks it against the faces of the package, and nothing runs it.

In: the types of the package. Out: an error of the type checker where a call is refused that is right, or where one that
is wrong is not: a line with `type: ignore` must have the error that it names.
"""

from collections.abc import Iterator
from typing import Any

import cadre
import torch


class Batch:
    """A batch of one's own, which says its documents."""

    lengths: list[int]


class Loader:
    def __iter__(self) -> Iterator[Batch]:
        raise NotImplementedError


def right(loader: Loader, q: torch.Tensor, ends: torch.Tensor) -> None:
    cadre.init(cadre.Shape(4, 2, 16, ("causal", cadre.Kind("window:64", chunk=100, heads=(2, 1)))), steps=3)
    batches = cadre.batches(loader, lambda batch: batch.lengths, accumulate=2, turns="F0 F1 B0 B1")
    for batch in batches:
        lengths: list[int] = batch.lengths
        is_last: bool = batches.is_last
        o = cadre.flash_attn_varlen_func(q, q, q, ends, ends, 5, 5, 0.0, 0.5, True, (63, 0), sinks=q, layer=q)
        cadre.varlen_attn(q, q, q, ends, None, 5, 5, window_size=(-1, 0), enable_gqa=True)
        flight = cadre.submit(q, q, q, causal=True, micro_batch=0)
        o, lse = cadre.wait(flight)
        with cadre.local(whole=True):
            cadre.flash_attn_func(q, q, q, causal=True)
        cadre.report(loss=0.5, tokens=sum(lengths), validation_loss=None)
        cadre.busy(60)
        if is_last and cadre.stopped():
            cadre.saved(3, "somewhere")
    packed = cadre.pack([[1, 2, 3], {"input_ids": [4, 5], "labels": [4, 5]}], rows=[2, 3])
    goes_on: bool = cadre.begin_step(packed.layout, next=[[3, 5], [8]], turns=2)
    cadre.next_micro_batch()
    names: list[str] = cadre.install()
    print(goes_on, names, o, lse)
    cadre.finish()


def session(q: torch.Tensor) -> str:
    rank = cadre.Session.join(kinds=["causal"], heads=[(2, 1, 8)], steps=1, seed=0, threads=1, rows="bfloat16")
    rank.announce(0, [([(0, 5)], [(0, 0, 5)])], [("F", 0), ("B", [0])], 0)
    ticket: cadre.Ticket = rank.submit((0, 0), (q, q, q), (q, q, q, None), lent=(0, 7))
    found: str | None = rank.wait(ticket, q, q, q)
    rank.leave("completed", for_good=False)
    return found or rank.begin(1)


def wrong(loader: Loader, q: Any, rank: cadre.Session, ticket: cadre.Ticket) -> None:
    cadre.init(cadre.Shape(4, 2, 16, "causal"), steps=3)  # type: ignore[arg-type]
    cadre.init(q)  # type: ignore[call-arg]
    cadre.init(q, steps="3")  # type: ignore[arg-type]
    cadre.batches(loader, lambda batch: batch.documents)  # type: ignore[attr-defined]
    cadre.begin_step([3.5])  # type: ignore[arg-type]
    cadre.flash_attn_varlen_func(q, q, q)  # type: ignore[call-arg]
    cadre.flash_attn_varlen_func(q, q, q, q, q, 5, 5, window=(1, 0))  # type: ignore[call-arg]
    cadre.varlen_attn(q, q, q, q, q, 5, 5, window_size=3)  # type: ignore[arg-type]
    cadre.submit(q, q, q, micro_batch="0")  # type: ignore[arg-type]
    cadre.wait(ticket)  # type: ignore[arg-type]
    cadre.local(True)  # type: ignore[call-arg]
    cadre.report(0.5)  # type: ignore[call-arg]
    rank.leave()  # type: ignore[call-arg]
    rank.submit(0, (q, q, q))  # type: ignore[arg-type]
    said: str = rank.wait(ticket, q, q)  # type: ignore[assignment]
    print(said)
