"""The inputs of one wrong number, in a file that cadre-gpu-probe reads: the emulated GPU then says what it has there.

In: a batch, its tensors, what was launched, the place of a number. Out: a file. A line of JSON says heads, documents
and the place; behind it lie the tensors, little endian: Q, K, V (bf16), or for a backward pass Q, dO, K, V (bf16), LSE,
Δ (f32).

A number of O, LSE or dQ needs its row and that row's keys; its bits depend on nothing else. One of dK or dV needs all
rows of the bundle that keep its key. Where those are too many for an emulated GPU, they come in blocks of 128 rows,
each beside its own copy of the key's tile and under no mask; the sum of the blocks is the number, but for rounding.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from cases import Batch, Tensors
    from ours import Line

# Multiply-adds of an emulated GPU that take some seconds.
MOST = 1 << 30
TILE = 128
FULL, CAUSAL = 0, 1


@dataclass
class Inputs:
    """What a launch got."""

    batch: Batch
    tensors: Tensors
    lse: torch.Tensor | None = None  # of a backward pass
    delta: torch.Tensor | None = None
    sinks: list[float] = field(default_factory=list)
    segment: int = 0
    folder: Path | None = None  # for files; none are written without


@dataclass
class Wanted:
    """Documents of a launch, the rows of Q and of K that they hold, and which rows of the result are summed."""

    documents: list[dict]
    q_rows: list[int]
    kv_rows: list[int]  # −1: zeros
    rows: list[int]


def kept(line: Line, row: int) -> tuple[int, int]:
    """Keys [begin, end) that a row keeps; all of them are held."""
    begin, end = 0, line.document_rows if line.mask == FULL else row + 1
    if line.mask > CAUSAL:
        begin = max(0, row - (line.mask - 2))
    return begin, end


def document(mask: int, document_rows: int, rows: tuple[int, int], keys: tuple[int, int], same: bool = False) -> dict:
    return {"mask": mask, "document_rows": document_rows, "rows": rows, "keys": keys, "same_bundle": same}


def of_row(lines: list[Line], row: int) -> Wanted:
    """A row of O, LSE or dQ."""
    line = next(it for it in lines if it.q_row <= row < it.q_row + it.rows_end - it.rows_begin)
    position = line.rows_begin + row - line.q_row
    begin, end = kept(line, position)
    first = line.kv_row + begin - line.keys_begin
    one = document(line.mask, line.document_rows, (position, position + 1), (begin, end))
    return Wanted([one], [row], list(range(first, first + end - begin)), [0])


def of_key(lines: list[Line], row: int, dim: int, group: int) -> Wanted:
    """A row of dK or dV."""
    line = next(it for it in lines if it.dkv_row <= row < it.dkv_row + it.keys_end - it.keys_begin)
    bundle = [it for it in lines if it.bundle == line.bundle]
    count = sum(it.rows_end - it.rows_begin for it in bundle)
    keys = (line.keys_begin, line.keys_end)
    if 5 * count * (keys[1] - keys[0]) * dim * group <= MOST:
        documents = [
            document(it.mask, it.document_rows, (it.rows_begin, it.rows_end), keys, it is not bundle[0])
            for it in bundle
        ]
        q_rows = [it.q_row + at for it in bundle for at in range(it.rows_end - it.rows_begin)]
        held = range(line.kv_row, line.kv_row + keys[1] - keys[0])
        return Wanted(documents, q_rows, list(held), [row - line.dkv_row])
    key = line.keys_begin + row - line.dkv_row
    tile = key // TILE * TILE
    held = [line.kv_row + it - keys[0] if keys[0] <= it < keys[1] else -1 for it in range(tile, tile + TILE)]
    found = Wanted([], [], [], [])
    for it in bundle:
        those = [at for at in range(it.rows_begin, it.rows_end) if kept(it, at)[0] <= key < kept(it, at)[1]]
        for block in (those[at : at + TILE] for at in range(0, len(those), TILE)):
            found.rows.append(len(found.kv_rows) + key - tile)
            found.documents.append(document(FULL, TILE, (0, len(block)), (0, TILE)))
            found.q_rows += [it.q_row + at - it.rows_begin for at in block]
            found.kv_rows += held
    return found


def content(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def write(inputs: Inputs, what: str, row: int, head: int, column: int) -> str:
    """The path of a file with the inputs of one number; none where there is no folder for it."""
    if inputs.folder is None:
        return ""
    import torch

    heads, tensors, dim = inputs.batch.heads, inputs.tensors, inputs.batch.heads.dim
    group, of_keys = heads.query // heads.kv, what in ("dK", "dV")
    wanted = of_key(inputs.batch.lines, row, dim, group) if of_keys else of_row(inputs.batch.lines, row)
    queries = slice(head * group, (head + 1) * group) if of_keys else slice(head, head + 1)
    kv = slice(head, head + 1) if of_keys else slice(head // group, head // group + 1)
    of_q, of_kv = (torch.tensor(it, device=tensors.q.device) for it in (wanted.q_rows, wanted.kv_rows))

    def keys(rows: torch.Tensor) -> torch.Tensor:
        return rows[of_kv.clamp_min(0), kv] * (of_kv >= 0)[:, None, None].to(rows.dtype)

    backward = inputs.lse is not None
    parts = [tensors.q[of_q, queries], *([tensors.dout[of_q, queries]] if backward else [])]
    parts += [keys(tensors.k), keys(tensors.v)]
    if backward:
        parts += [it[of_q, queries].float() for it in (inputs.lse, inputs.delta)]
    first = {
        "pass": "backward" if backward else "forward",
        "heads": [parts[0].shape[1], 1, dim],
        "softcap": inputs.batch.softcap or None,
        "segment": inputs.segment or None,
        "sinks": inputs.sinks[queries],
        "documents": wanted.documents,
        "at": {"what": what, "rows": wanted.rows, "head": 0, "column": column},
    }
    inputs.folder.mkdir(parents=True, exist_ok=True)
    path = inputs.folder / f"{what}-{dim}-{len(list(inputs.folder.iterdir()))}.given"
    path.write_bytes(b"\n".join([json.dumps(first).encode(), b"".join(content(it) for it in parts)]))
    return str(path)
