"""Documents that span ranks under `cadre check`: attention without a pool, and what one rank is handed in their place.

In: stretches of each rank, rows of Q, K and V; batches of all ranks. Out: this rank's rows of the attention of whole
documents, which every rank that holds some of them computes for itself; batches of whole documents. Ranks exchange
rows through torch.distributed, in a group of their own.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._layout import Stretch
from ._recut import NotTriedError

Told = tuple[list[Stretch], tuple[Tensor, ...]]
"""What a rank holds, and rows of it."""


class Exchange:
    """See the module."""

    def __init__(self) -> None:
        self.group: Any = None

    def whole(self, layout: list[Stretch], rows: Sequence[Tensor], call: Callable[..., tuple]) -> tuple[Tensor, ...]:
        """Calls `call` with lengths and rows of whole documents; returns this rank's part of the results."""
        told = self.gather((layout, tuple(it.detach() for it in rows)))
        mine = list(dict.fromkeys(it.document for it in layout))
        documents = [self.document(it, told) for it in mine]
        whole = [torch.cat(it) for it in zip(*documents, strict=True)]
        lengths = [len(it[0]) for it in documents]
        starts = dict(zip(mine, itertools.accumulate(lengths, initial=0), strict=False))
        made = call(lengths, whole)
        held = [(starts[it.document] + it.start, starts[it.document] + it.end) for it in layout]
        return tuple(torch.cat([it[start:end] for start, end in held]) for it in made)

    def gather(self, own: Told) -> list[Told]:
        if not dist.is_initialized():
            raise NotImplementedError(
                "cadre check: documents span ranks, which tell each other their rows through torch.distributed; call "
                "init_process_group before the first batch"
            )
        if self.group is None:
            self.group = dist.new_group(backend="gloo")
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, own, group=self.group)
        return told

    @staticmethod
    def document(number: int, told: list[Told]) -> list[Tensor]:
        """Rows of a document, from all ranks that hold some."""
        pieces = []
        for layout, rows in told:
            first = 0
            for it in layout:
                if it.document == number:
                    pieces.append((it, [of[first : first + it.end - it.start] for of in rows]))
                first += it.end - it.start
        pieces.sort(key=lambda it: it[0].start)
        ends = [0, *(it.end for it, _ in pieces)]
        if [it.start for it, _ in pieces] != ends[:-1] or ends[-1] != pieces[0][0].rows:
            raise ValueError(
                f"document {number} of {pieces[0][0].rows} rows is not held once: {[it for it, _ in pieces]}"
            )
        return [torch.cat(it) for it in zip(*(rows for _, rows in pieces), strict=True)]


def lengths_of_whole(layouts: Sequence[list[Stretch]]) -> list[int]:
    """Lengths of the documents that all ranks hold together, in the order of the ranks."""
    lengths: list[int] = []
    last: Stretch | None = None
    for it in (it for layout in layouts for it in layout):
        expected = last.end if last and last.end < last.rows else 0
        goes_on = last is not None and expected > 0
        if it.start != expected or (goes_on and it.document != last.document):
            raise NotTriedError("documents that span ranks do not follow each other in the order of the ranks")
        if not goes_on:
            lengths.append(it.rows)
        last = it
    if last is None or last.end != last.rows:
        raise NotTriedError("a document that spans ranks has no end")
    return lengths


def joined(batches: Sequence[Any], layouts: Sequence[list[Stretch]]) -> Any:
    """One batch with the batches of all ranks."""
    lengths, held = lengths_of_whole(layouts), [[it.end - it.start for it in of] for of in layouts]

    def leaf(its: list[Any]) -> Any:
        tensors = all(isinstance(it, Tensor) for it in its)
        if tensors and all(it.dim() == 1 and it.diff().tolist() == of for it, of in zip(its, held, strict=True)):
            return torch.tensor([0, *lengths], device=its[0].device).cumsum(0).to(its[0].dtype)
        if tensors and all(it.dim() > 1 and it.shape[:2] == (1, sum(of)) for it, of in zip(its, held, strict=True)):
            return torch.cat(its, 1)
        if tensors and all(it.dim() and it.shape[0] == sum(of) for it, of in zip(its, held, strict=True)):
            return torch.cat(its)
        if all(isinstance(it, int) and it == max(of) for it, of in zip(its, held, strict=True)):
            return max(lengths)
        if tensors and not all(torch.equal(it, its[0]) for it in its):
            raise NotTriedError("batches of ranks hold tensors without a number a row, which differ")
        return its[0]

    def join(its: list[Any]) -> Any:
        one = its[0]
        if list(its) == list(layouts):
            return [Stretch(at, rows, 0, rows) for at, rows in enumerate(lengths)]
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            names = [it.name for it in dataclasses.fields(one)]
            return dataclasses.replace(one, **{name: join([getattr(it, name) for it in its]) for name in names})
        if isinstance(one, Mapping):
            made = {key: join([it[key] for it in its]) for key in one}
            kind: Any = type(one)
            return made if kind is dict else kind(made)
        if isinstance(one, (list, tuple)) and not hasattr(one, "_fields"):
            return type(one)(join(list(it)) for it in zip(*its, strict=True))
        return leaf(its)

    return join(list(batches))
