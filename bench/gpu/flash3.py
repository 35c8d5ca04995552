"""FlashAttention 3 as a peer: its kernels for head dim 128 behind the C face that scripts/flash-attention builds.

In: a batch and its tensors; libfa3.so beside this file. Out: a `Peer`. Scratch is made once, of the sizes that
FlashAttention's own flash_api.cpp takes; equal documents go as a dense batch, others by cumulated lengths. Raises
ImportError where the library is not packed, and ValueError for what it was not built for.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from cases import Batch, Tensors

LIBRARY = Path(__file__).resolve().parent / "libfa3.so"
DIM = 128
POINTERS = (
    *(
        "q",
        "k",
        "v",
        "o",
        "lse",
        "cu_q",
        "cu_k",
        "metadata",
        "dout",
        "dq",
        "dk",
        "dv",
        "dq_accum",
        "dk_accum",
        "dv_accum",
    ),
    *("delta", "lse_log2", "dq_semaphore", "dkv_semaphores"),
)
NUMBERS = (
    "batch",
    "total_q",
    "total_k",
    "max_q",
    "max_k",
    "heads",
    "kv_heads",
    "causal",
    "deterministic",
    "processors",
)


class Asked(ctypes.Structure):
    """As `Fa3` of fa3/fa3.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("dk_accum_bytes", "dkv_semaphore_bytes")),
        *((name, ctypes.c_int) for name in NUMBERS),
        ("scale", ctypes.c_float),
    ]


def rounded(number: int, to: int) -> int:
    return (number + to - 1) // to * to


def sizes(batch: Batch, rows: list[int], keys: list[int], dense: bool) -> dict[str, int]:
    """Numbers of each scratch, as mha_bwd has them."""
    heads, count = batch.heads, len(rows)
    block_m, block_n = (64 if batch.causal else 80), 128
    padded_q = rounded(sum(rows) + count * block_m, block_m)
    padded_k = rounded(sum(keys) + count * block_n, block_n)
    if dense:
        padded_q, padded_k = count * rounded(max(rows), block_m), count * rounded(max(keys), block_n)
    return {
        "metadata": 4 * rounded(count, 4) + 1,
        "delta": heads.query * padded_q,
        "lse_log2": heads.query * padded_q,
        "dq_accum": heads.query * padded_q * DIM,
        "dk_accum": heads.kv * padded_k * DIM,
        "dv_accum": heads.kv * padded_k * DIM,
        "dq_semaphore": rounded(max(rows), block_m) // block_m * count * heads.query,
        "dkv_semaphores": 2 * (rounded(max(keys), block_n) // block_n * count * heads.kv),
    }


def make(batch: Batch, tensors: Tensors, keys: tuple, fixed: bool, dense: bool):
    from peers import Peer, of_batch, offsets

    if not LIBRARY.exists():
        raise ImportError("libfa3.so is not packed; scripts/flash-attention builds it")
    if batch.heads.dim != DIM:
        raise ValueError(f"FlashAttention 3 is packed for head dim {DIM} alone")
    calls = ctypes.CDLL(str(LIBRARY))
    k, v, lengths = keys
    rows, heads, device = [it[0] for it in batch.sequences], batch.heads, k.device
    out, dq, dk, dv = (torch.empty_like(it) for it in (tensors.q, tensors.q, k, v))
    lse = torch.empty(heads.query * sum(rows), dtype=torch.float32, device=device)
    integers = ("metadata", "dq_semaphore", "dkv_semaphores")
    count = sizes(batch, rows, lengths, dense)
    scratch = {
        name: torch.zeros(it, dtype=torch.int32 if name in integers else torch.float32, device=device)
        for name, it in count.items()
    }
    held = {
        "q": tensors.q,
        "k": k,
        "v": v,
        "o": out,
        "lse": lse,
        "dout": tensors.dout,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        **scratch,
    }
    if not dense:
        held |= {"cu_q": offsets(rows, device), "cu_k": offsets(lengths, device)}
    asked = Asked(**{name: it.data_ptr() for name, it in held.items()})
    asked.dk_accum_bytes, asked.dkv_semaphore_bytes = count["dk_accum"] * 4, count["dkv_semaphores"] * 2
    asked.batch, asked.total_q, asked.total_k = len(rows), sum(rows), sum(lengths)
    asked.max_q, asked.max_k, asked.heads, asked.kv_heads = max(rows), max(lengths), heads.query, heads.kv
    asked.causal, asked.deterministic, asked.scale = batch.causal, fixed, heads.scale
    asked.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def run(call) -> None:
        # `held` lives as long as the calls do.
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if held and call(ctypes.byref(asked), stream) != 0:
            raise RuntimeError("FlashAttention 3 was refused by the runtime")

    name = "FA3" + ("" if dense else " varlen") + (" deterministic" if fixed else "")
    gradients = lambda: of_batch(batch, tensors, dq, dk, dv)  # noqa: E731
    return Peer(name, lambda: run(calls.fa3_forward), lambda: run(calls.fa3_backward), lambda: out, fixed, gradients)
