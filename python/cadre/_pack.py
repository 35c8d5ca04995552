"""Documents one behind the other over all ranks of a micro-batch, cut where a rank's rows end.

In: documents, the same ones in the same order on every rank. Out: what this rank holds of them: tokens, positions in
the whole document, labels that are shifted before anything is cut, weights whose sum over all ranks is 1, and the
layout that the pool is told. So losses and gradients of all ranks, added, are those of one rank that holds it all.

It draws no data and knows no model.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _job
from ._layout import Stretch, remember_parts
from ._mistakes import names_rank

IGNORED = -100
"""A label that nothing is asked of, as torch's cross entropy has it."""
_OURS = ("input_ids", "labels", "loss_weights")

Document: TypeAlias = Tensor | Sequence[int] | Mapping[str, Tensor | Sequence[Any]]
"""Tokens, or fields of which each has a number, or a tensor, a token."""


@dataclass(frozen=True)
class Packed:
    """What a rank holds of a micro-batch; tensors of `[1, rows]`, but for the last ones."""

    input_ids: Tensor
    position_ids: Tensor
    """Positions in the whole document."""
    shift_labels: Tensor
    """The next token of the same document, wherever it lies; -100 where there is none."""
    loss_weights: Tensor
    """What the loss of a row counts. Over all rows of all ranks they add up to 1."""
    cu_seqlens: Tensor
    """Where the pieces end that this rank holds."""
    layout: list[Stretch]
    """For `begin_step`; `batches` finds it."""
    targets: int
    """Rows of all ranks that have a label."""
    more: dict[str, Tensor]
    """Further fields of the documents, `[rows, ...]`."""

    @names_rank
    def inputs(self) -> dict[str, Any]:
        """What a causal model of transformers is called with. Its own loss divides by `targets` and weighs all rows
        alike; for other weights take `loss`."""
        labels, ends = self.shift_labels, self.cu_seqlens
        named = {"input_ids": self.input_ids, "position_ids": self.position_ids, "labels": labels}
        more = {"shift_labels": labels, "num_items_in_batch": self.targets}
        return named | more | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}

    @names_rank
    def loss(self, logits: Tensor) -> Tensor:
        """This rank's part of the loss, from logits of all its rows: cross entropy with weights. The parts of all
        ranks are summed, not averaged: under DDP and FSDP, which average gradients, multiply it by the ranks."""
        rows = logits.reshape(-1, logits.shape[-1]).float()
        if len(rows) != self.shift_labels.numel():
            raise ValueError(f"loss: logits of {len(rows)} rows, and the rank holds {self.shift_labels.numel()}")
        labels = self.shift_labels.flatten()
        each = torch.nn.functional.cross_entropy(rows, labels, ignore_index=IGNORED, reduction="none")
        return (each * self.loss_weights.flatten()).sum()


@names_rank
def pack(
    documents: Sequence[Document],
    *,
    rows: Sequence[int] | None = None,
    total: float | None = None,
    rank: int | None = None,
    ranks: int | None = None,
) -> Packed:
    """What this rank holds of `documents`, which every rank gives alike.

    A document is its tokens, or a mapping with `input_ids`, and if need be `labels` (not shifted; -100 asks nothing),
    `loss_weights` (of each token as a label; default 1) and further fields. `rows`: how many rows each rank holds
    (default: as many, or one more). `total`: what weights are divided by (default: their sum), where an update has
    several micro-batches. `rank`, `ranks`: default are those of the job, or of RANK and WORLD_SIZE.
    """
    rank, ranks = _place(rank, ranks)
    if not len(documents):
        raise ValueError("pack: there is no document; give one or more")
    fields = [_fields(at, it) for at, it in enumerate(documents)]
    if odd := [at for at, it in enumerate(fields) if it.keys() != fields[0].keys()]:
        told = (sorted(fields[0]), sorted(fields[odd[0]]))
        raise ValueError(
            f"pack: document 0 has {told[0]} and document {odd[0]} has {told[1]}; give all the same fields"
        )
    lengths = [len(it["input_ids"]) for it in fields]
    start, end = _share(sum(lengths), rows, rank, ranks)
    layout, first = [], 0
    for document, length in enumerate(lengths):
        piece = Stretch(document, length, max(start - first, 0), min(end - first, length))
        if piece.start < piece.end:
            layout.append(piece)
        first += length

    def held(name: str) -> Tensor:
        return torch.cat([fields[it.document][name][it.start : it.end] for it in layout])

    weights = sum(float(it["loss_weights"].sum(dtype=torch.float64)) for it in fields) if total is None else total
    if not 0 <= weights < float("inf") or (total is not None and not total):
        raise ValueError(f"pack: loss weights are divided by {weights}; give weights, and a total, above 0")
    ends = torch.tensor([0, *(it.end - it.start for it in layout)], device="cpu").cumsum(0).int()
    remember_parts(layout)
    tokens = held("input_ids")
    return Packed(
        input_ids=tokens[None],
        position_ids=torch.cat([torch.arange(it.start, it.end, device=tokens.device) for it in layout])[None],
        shift_labels=held("labels")[None],
        # Without anything to learn all of them are 0.
        loss_weights=held("loss_weights")[None] / (weights or 1.0),
        cu_seqlens=ends,
        layout=layout,
        targets=sum(int((it["labels"] != IGNORED).sum()) for it in fields),
        more={name: held(name) for name in fields[0] if name not in _OURS},
    )


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    job = _job.current()
    own = (job.rank, job.ranks) if job and job.session else None
    own = own or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    if (rank is None) != (ranks is None):
        raise ValueError(f"pack: rank is {rank} and ranks {ranks}; give both, or none")
    rank, ranks = own if rank is None else (rank, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"pack: rank {rank} of {ranks}; ranks count from 0")
    return rank, ranks


def _fields(at: int, document: Document) -> dict[str, Tensor]:
    """Fields of a document, labels and their weights shifted to the rows that predict them."""
    given: dict[str, Any] = dict(document) if isinstance(document, Mapping) else {"input_ids": document}
    if "input_ids" not in given:
        raise ValueError(f"pack: document {at} has {sorted(given)} and no input_ids")
    tokens = _tensor(given["input_ids"])
    made = {name: _tensor(it, device=tokens.device) for name, it in given.items()}
    if tokens.dim() != 1 or not len(tokens) or tokens.is_floating_point():
        raise ValueError(f"pack: document {at} is {tuple(tokens.shape)} of {tokens.dtype}; give 1 token or more, a row")
    for name, it in made.items():
        if it.shape[:1] != tokens.shape:
            raise ValueError(f"pack: {name} of document {at} is {tuple(it.shape)}, and it has {len(tokens)} tokens")
    labels = made.get("labels", tokens)
    weights = made.get("loss_weights", torch.ones(len(tokens), device=tokens.device)).float()
    if labels.dim() != 1 or weights.dim() != 1 or not bool((weights >= 0).all()):
        raise ValueError(f"pack: document {at}: give each token one label, and one loss weight of 0 or more")
    made["labels"] = torch.cat([labels[1:], labels.new_full((1,), IGNORED)]).long()
    shifted = torch.cat([weights[1:], weights.new_zeros(1)])
    made["loss_weights"] = torch.where(made["labels"] == IGNORED, 0.0, shifted)
    made["input_ids"] = tokens.long()
    return made


def _tensor(it: Any, device: torch.device | None = None) -> Tensor:
    """Tensors stay where they are, whatever torch's default device is."""
    return it if isinstance(it, Tensor) else torch.as_tensor(it, device=device)


def _share(count: int, rows: Sequence[int] | None, rank: int, ranks: int) -> tuple[int, int]:
    """Rows of a rank in the stream of all ranks: the first one, and the one after the last."""
    each = [(count + ranks - 1 - it) // ranks for it in range(ranks)] if rows is None else [int(it) for it in rows]
    if len(each) != ranks or min(each) < 1 or sum(each) != count:
        raise ValueError(f"pack: {count} rows, of which ranks hold {each}; each of {ranks} ranks holds 1 or more")
    start = sum(each[:rank])
    return start, start + each[rank]
