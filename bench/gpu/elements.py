"""Of a wrong result the first wrong element: where it lies, which others are wrong, and what went into it.

In: a table of results and what it should be, `[rows, heads, numbers]` or `[rows, heads]`; what was launched. Out: the
`wrong` of a row, in the words of cadre-gpu-probe, with a file of the element's inputs. An element is wrong if it is off
by 16 times what the table may be, or where bits count if any differs; NaN is.
"""

from __future__ import annotations

import given
import torch
from cases import Batch, Tensors

# How many times the table's bound one element may be off.
ONE = 16


def ranges(numbers: list[int]) -> str:
    """`0-31 40 64-127`; at most 8 parts."""
    parts: list[list[int]] = []
    for it in numbers:
        if parts and parts[-1][1] + 1 == it:
            parts[-1][1] = it
        else:
            parts.append([it, it])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in parts[:8]]
    return " ".join([*words, *([f"… {len(parts)} parts"] if len(parts) > 8 else [])])


def wrong(
    inputs: given.Inputs, what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None
) -> dict:
    """Without a tolerance every other bit is wrong."""
    batch, tensors = inputs.batch, inputs.tensors
    a, b = (it.double().reshape(*it.shape[:2], -1) for it in (actual, expected))
    size = torch.where(b.isfinite(), b, 0.0).square().mean().sqrt()
    off = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    if tolerance is None:
        off = bits(actual).ne(bits(expected)).reshape(off.shape).double()
    places = (off > (0 if tolerance is None else ONE * tolerance * size)).nonzero()
    if not len(places):
        # Where many elements are off a little, the one that is off most is shown.
        places = (off == off.max()).nonzero()
    row, head, column = places[0].tolist()
    found = [ranges(places[:, it].unique().tolist()) for it in range(3)]
    return {
        "first": f"{what}:{row}:{head}:{column}",
        "ours": str(a[row, head, column].item()),
        "right": str(b[row, head, column].item()),
        "count": f"{len(places)} of {a.numel()}",
        **dict(zip(("rows", "heads", "columns"), found)),
        "tile": tile(batch, what, row, column),
        "operands": operands(batch, tensors, what, row, head),
        "given": given.write(inputs, what, row, head, column),
    }


def bits(rows: torch.Tensor) -> torch.Tensor:
    """Bits as integers, so that NaN and −0 are compared, too."""
    return rows.view(torch.int16 if rows.dtype == torch.bfloat16 else torch.int32)


def tile(batch: Batch, what: str, row: int, column: int) -> str:
    """Who in the kernel holds an element, as `tile` of kernels/check/probe/compare.rs has it."""
    dim = batch.heads.dim
    for it in batch.lines:
        if what in ("dK", "dV"):
            if it.dkv_row <= row < it.dkv_row + it.keys_end - it.keys_begin:
                position = it.keys_begin + row - it.dkv_row
                group, of_group = (column // 128, column % 128) if dim == 256 else (position % 128 // 64, column)
                where = f"key {position}, key tile {position // (64 if dim == 256 else 128)}"
                return f"{where}, warpgroup {group}, {fragment(position, of_group)}"
        elif it.q_row <= row < it.q_row + it.rows_end - it.rows_begin:
            position = it.rows_begin + row - it.q_row
            rows, group, of_group = 128, position % 128 // 64, column
            if what == "dQ":
                rows, group, of_group = 64, column // (dim // 2), column % (dim // 2)
            where = f"row {position}, tile of rows {position // rows}"
            return f"{where}, warpgroup {group}, {fragment(position, of_group)}"
    return "of no task"


def fragment(row: int, column: int) -> str:
    """Of a product of 64 rows, whose layout is that of wgmma's results."""
    lane, register = row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return f"warp {row % 64 // 16}, lane {lane}, register {register}"


def operands(batch: Batch, tensors: Tensors, what: str, row: int, head: int) -> dict:
    group = batch.heads.query // batch.heads.kv
    if what in ("dK", "dV"):
        named = {"K of the key": tensors.k[row, head], "V of the key": tensors.v[row, head]}
    else:
        named = {"Q of the row": tensors.q[row, head], "dO of the row": tensors.dout[row, head]}
        own = next((it for it in batch.lines if it.q_row <= row < it.q_row + it.rows_end - it.rows_begin), None)
        if own:
            named["K of the first key held"] = tensors.k[own.kv_row, head // group]
            named["V of the first key held"] = tensors.v[own.kv_row, head // group]
    return {name: [round(x, 4) for x in it[:4].float().tolist()] for name, it in named.items()}
