"""Cadre's GPU kernels on PyTorch's tensors, through libcadre_attention.so (kernels/c).

In: tasks as `Line`s, tensors [rows, heads, dim]. Out: tensors that were given, written. Nothing here compares or
times.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

FULL, CAUSAL = 0, 1


def window(left: int) -> int:
    return left + 2


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("query_heads", "kv_heads", "dim", "segment", "blocks")),
        *((name, ctypes.c_uint32) for name in ("fixed_order", "launches")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Line(ctypes.Structure):
    """A task, or a part of a bundle; see cadre_task in kernels/c/include/cadre_attention.h."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in (
            *("mask", "document_rows", "rows_begin", "rows_end", "q_row"),
            *("keys_begin", "keys_end", "kv_row", "dkv_row", "bundle"),
        )
    ]


class Tensor(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class RowLine(ctypes.Structure):
    """Rows to copy, in bytes; see RowCopy in kernels."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("from_", "to", "rows", "bytes", "from_stride", "to_stride")]


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)

    def __str__(self) -> str:
        return f"{self.query}:{self.kv} d{self.dim}"


class HangsError(Exception):
    """A launch that is not over after a time that no launch takes."""


class Library:
    """The library with one GPU open; `device` is that of the tensors ("cpu" where the driver is an emulated one)."""

    def __init__(
        self, path: Path, device: str, form: str = "", given: Path | None = None, patience: float = 10.0
    ) -> None:
        """With the kernels of the folder `form`, if any; inputs of wrong numbers go to the folder `given`."""
        self.device, self.given, self.patience = torch.device(device), given, patience
        self.calls = ctypes.CDLL(str(path))
        pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
        for name, result, arguments in [
            ("cadre_error", ctypes.c_char_p, []),
            ("cadre_open", pointer, [ctypes.c_uint32]),
            ("cadre_open_form", pointer, [ctypes.c_uint32, ctypes.c_char_p]),
            ("cadre_watch", pointer, [pointer]),
            ("cadre_told", ctypes.c_char_p, [pointer, ctypes.c_char_p]),
            ("cadre_processors", ctypes.c_uint32, [pointer]),
            ("cadre_uuid", ctypes.c_char_p, [pointer]),
            ("cadre_wait", ctypes.c_int32, [pointer, u64, u64]),
            ("cadre_forward_plan", pointer, [pointer, pointer, u64, Shape, ctypes.POINTER(Line), u64]),
            ("cadre_forward_run", ctypes.c_int32, [pointer, pointer, u64, ctypes.POINTER(Tensor)]),
            ("cadre_forward_sink", ctypes.c_int32, [pointer, pointer, u64, ctypes.POINTER(Tensor)]),
            ("cadre_forward_tile_pairs", u64, [pointer]),
            ("cadre_forward_free", None, [pointer]),
            ("cadre_backward_plan", pointer, [pointer, pointer, u64, Shape, ctypes.POINTER(Line), u64]),
            (
                "cadre_backward_run",
                ctypes.c_int32,
                [pointer, pointer, u64, ctypes.POINTER(Tensor), ctypes.c_uint32],
            ),
            ("cadre_backward_free", None, [pointer]),
            ("cadre_rows_open", pointer, [pointer, u64]),
            ("cadre_rows_copy", ctypes.c_int32, [pointer, ctypes.POINTER(Tensor), ctypes.POINTER(RowLine), u64]),
            ("cadre_rows_free", None, [pointer]),
        ]:
            call = getattr(self.calls, name)
            call.restype, call.argtypes = result, arguments
        opened = self.calls.cadre_open_form(0, form.encode()) if form else self.calls.cadre_open(0)
        self.gpu = self.check(opened)
        self.watch = self.calls.cadre_watch(self.gpu) if form else None
        self.processors = self.calls.cadre_processors(self.gpu)
        self.uuid = self.calls.cadre_uuid(self.gpu).decode()

    def check(self, result):
        """What a call gave; its words as an exception where it failed."""
        if result is None or result == -1:
            raise RuntimeError(self.calls.cadre_error().decode())
        return result

    def waits(self, kernel: str) -> dict | None:
        """Where the warps of a kernel wait that has told it before it trapped."""
        told = self.calls.cadre_told(self.watch, kernel.encode()) if self.watch else b""
        return json.loads(told) if told else None

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0

    def wait(self) -> None:
        if self.check(self.calls.cadre_wait(self.gpu, self.stream(), int(self.patience * 1000))) == 1:
            raise HangsError(f"a launch does not end in {self.patience:.0f} s")


def places(tensors: list[torch.Tensor]) -> ctypes.Array:
    for it in tensors:
        assert it.is_contiguous(), "tensors of a launch are contiguous"
    return (Tensor * len(tensors))(*(Tensor(it.data_ptr(), it.numel()) for it in tensors))


class Forward:
    """Tasks, planned once; `run` puts a launch on the current stream."""

    def __init__(
        self,
        library: Library,
        heads: Heads,
        lines: list[Line],
        segment: int = 0,
        blocks: int = 0,
        softcap: float = 0,
    ) -> None:
        self.library = library
        shape = Shape(heads.query, heads.kv, heads.dim, segment, blocks, 1, 1, heads.scale, softcap)
        calls, table = library.calls, (Line * len(lines))(*lines)
        self.plan = library.check(
            calls.cadre_forward_plan(library.gpu, None, library.stream(), shape, table, len(lines))
        )

    def run(self, q, k, v, out, lse) -> None:
        it = self.library
        it.check(it.calls.cadre_forward_run(it.gpu, self.plan, it.stream(), places([q, k, v, out, lse])))

    def sink(self, sinks, out, lse) -> None:
        it = self.library
        it.check(it.calls.cadre_forward_sink(it.gpu, self.plan, it.stream(), places([sinks, out, lse])))

    def __del__(self) -> None:
        if getattr(self, "plan", None):
            self.library.calls.cadre_forward_free(self.plan)


class Backward:
    """Bundles, planned once; `run` puts the launches on the current stream."""

    def __init__(
        self,
        library: Library,
        heads: Heads,
        lines: list[Line],
        fixed: bool,
        launches: int = 1,
        blocks: int = 0,
        softcap: float = 0,
    ) -> None:
        self.library = library
        shape = Shape(heads.query, heads.kv, heads.dim, 0, blocks, fixed, launches, heads.scale, softcap)
        calls, table = library.calls, (Line * len(lines))(*lines)
        self.plan = library.check(
            calls.cadre_backward_plan(library.gpu, None, library.stream(), shape, table, len(lines))
        )

    def run(self, q, dout, k, v, lse, delta, dq, dk, dv) -> None:
        """dQ is f32 or bf16."""
        it, narrow = self.library, int(dq.dtype == torch.bfloat16)
        tensors = places([q, dout, k, v, lse, delta, dq, dk, dv])
        it.check(it.calls.cadre_backward_run(it.gpu, self.plan, it.stream(), tensors, narrow))

    def __del__(self) -> None:
        if getattr(self, "plan", None):
            self.library.calls.cadre_backward_free(self.plan)


class Rows:
    """Copies of rows on the current stream; each list is a launch."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.rows = library.check(library.calls.cadre_rows_open(library.gpu, library.stream()))

    def copy(self, source: torch.Tensor, target: torch.Tensor, lines: ctypes.Array) -> None:
        """Copies rows between two tensors of bytes."""
        tensors, it = places([source, target]), self.library
        it.check(it.calls.cadre_rows_copy(self.rows, tensors, lines, len(lines)))

    def __del__(self) -> None:
        if getattr(self, "rows", None):
            self.library.calls.cadre_rows_free(self.rows)


def kept_pairs(lines: list[Line]) -> int:
    """Pairs of query and key, of one head, that the masks keep."""
    total = 0
    for it in lines:
        rows = it.rows_end - it.rows_begin
        if it.mask == FULL:
            total += rows * (it.keys_end - it.keys_begin)
        elif it.mask == CAUSAL:
            # Row r keeps keys up to r.
            total += (it.rows_begin + 1 + it.rows_end) * rows // 2 - rows * it.keys_begin
        else:
            left = it.mask - 2
            total += sum(r + 1 - max(r - left, it.keys_begin) for r in range(it.rows_begin, it.rows_end))
    return total
