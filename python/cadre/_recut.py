"""Batches made of another batch: with a token changed, or of pieces of its documents. For `cadre check`.

In: a batch of any structure (mappings, lists, tuples of tensors and numbers), and the lengths of its documents. Out: a
batch of the same structure. What has a number a row goes with its rows; lengths and ends of documents, positions,
numbers of documents and the longest length are made anew. What else a batch holds stays as it is.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._layout import Stretch

Piece = tuple[int, int]
"""First row, and the one after the last, in the stream of all documents."""

_TOKENS = ("input_ids", "tokens", "input", "inputs", "x", "ids")


class NotTriedError(Exception):
    """The batch does not allow this check."""


def _mapped(batch: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """The same structure with changed leaves; `change` gets the name of each."""
    if isinstance(batch, list) and batch and all(type(it) in (int, Stretch) for it in batch):
        return change(name, batch)
    if isinstance(batch, Mapping):
        made = {key: _mapped(it, change, str(key)) for key, it in batch.items()}
        kind: Any = type(batch)
        return made if kind is dict else kind(made)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [it.name for it in dataclasses.fields(batch)]
        return dataclasses.replace(batch, **{it: _mapped(getattr(batch, it), change, it) for it in fields})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        named = zip(batch._fields, batch, strict=True)
        return type(batch)(*(_mapped(it, change, key) for key, it in named))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_mapped(it, change, f"{name}[{at}]") for at, it in enumerate(batch))
    return change(name, batch)


def copied(batch: Any) -> Any:
    """A copy of a batch, since a loader may overwrite it."""

    def copy(_: str, it: Any) -> Any:
        return it.detach().clone() if isinstance(it, Tensor) else list(it) if isinstance(it, list) else it

    return _mapped(batch, copy)


def with_another_token(batch: Any, rows: int, row: int) -> Any:
    """The batch with another token in one row."""
    found: dict[str, Tensor] = {}

    def look(name: str, it: Any) -> Any:
        if isinstance(it, Tensor) and it.numel() == rows and it.dtype in (torch.int64, torch.int32):
            found.setdefault(name, it)
        return it

    _mapped(batch, look)
    name = next((it for it in (*_TOKENS, *found) if it in found and "position" not in it and it != "labels"), None)
    if name is None:
        raise NotTriedError("the batch has no tensor of tokens with one a row")
    tokens = found[name].clone()
    flat = tokens.view(-1)
    others = flat[flat != flat[row]]
    flat[row] = others[0] if len(others) else flat[row] ^ 1
    return _mapped(batch, lambda at, it: tokens if at == name else it)


def of_pieces(batch: Any, lengths: Sequence[int], pieces: Sequence[Piece]) -> Any:
    """A batch with these pieces as its documents."""
    rows, told = sum(lengths), [end - start for start, end in pieces]
    ends = list(itertools.accumulate(lengths, initial=0))
    new_ends = list(itertools.accumulate(told, initial=0))
    cut = 0

    def described(numbers: list[Any]) -> list[int] | None:
        """The numbers of the new documents, if these are the lengths or the ends of the old ones."""
        if numbers == ends:
            return list(new_ends)
        # Documents of 1 row have as many lengths as rows.
        return list(told) if numbers == list(lengths) and len(lengths) != rows else None

    def change(name: str, it: Any) -> Any:
        nonlocal cut
        if isinstance(it, int) and not isinstance(it, bool) and it == max(lengths) and "max" in name:
            return max(told)
        if isinstance(it, list):
            if isinstance(it[0], Stretch):
                return [Stretch(at, rows, 0, rows) for at, rows in enumerate(told)]
            return described(it) or [change(name, number) for number in it]
        if not isinstance(it, Tensor):
            return it
        if it.dim() == 1 and (new := described(it.tolist())):
            return torch.tensor(new, dtype=it.dtype, device=it.device)
        one_row = it.dim() > 1 and it.shape[:2] == (1, rows)
        many_rows = it.dim() > 1 and it.shape[:2] == (len(lengths), rows // len(lengths)) and len(set(lengths)) == 1
        if not one_row and not many_rows and it.shape[:1] != (rows,):
            return it
        cut += 1
        flat = it if it.shape[0] == rows and not one_row else it.flatten(0, 1)
        whole = not it.is_floating_point()
        if whole and "position" in name:
            new = torch.cat([torch.arange(rows, dtype=it.dtype, device=it.device) for rows in told])
        elif whole and name in ("seq_idx", "document_ids", "sequence_ids"):
            new = torch.cat([torch.full((rows,), at, dtype=it.dtype, device=it.device) for at, rows in enumerate(told)])
        else:
            new = torch.cat([flat[start:end] for start, end in pieces])
        if one_row:
            return new[None]
        if many_rows and it.shape[0] != rows:
            if len(set(told)) > 1:
                raise NotTriedError("a row of the batch is a document, so that all have one length")
            return new.unflatten(0, (len(told), told[0]))
        return new

    made = _mapped(batch, change)
    if not cut:
        raise NotTriedError("the batch has no tensor with a number a row")
    return made
