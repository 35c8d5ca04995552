"""Batches for checks and benches: dense, packed documents, tasks as the planner makes them, tasks of 128 rows.

In: lengths. Out: a `Batch`, its lines for Cadre and its sequences for peers. Tensors are random, fresh, never zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from ours import CAUSAL, FULL, Heads, Line


@dataclass
class Batch:
    """Tasks of documents, with rows packed one behind the other.

    A sequence is a task for peers: its query rows and keys, causal from the end of the keys or full. Its keys lie in
    `peer_keys` [begin, end) of K and V; where tasks share a document peers get copies of its keys.
    """

    name: str
    heads: Heads
    lines: list[Line] = field(default_factory=list)
    q_rows: int = 0
    kv_rows: int = 0
    sequences: list[tuple[int, int, int, int]] = field(default_factory=list)  # q rows, keys, q row, kv row
    causal: bool = True
    softcap: float = 0  # 0: none
    softcap_too: bool = False  # measured with softcap, too

    def document(self, rows: int, parts: list[tuple[int, int]], mask: int = CAUSAL, keys_end: int = 0) -> None:
        """Adds a document whose query rows are `parts`, in one bundle."""
        keys_end = keys_end or (max(end for _, end in parts) if mask == CAUSAL else rows)
        bundle = len({it.bundle for it in self.lines})
        self.causal = mask == CAUSAL
        for begin, end in parts:
            keys = end if mask == CAUSAL else rows
            self.lines.append(
                Line(mask, rows, begin, end, self.q_rows, 0, keys_end, self.kv_rows, self.kv_rows, bundle)
            )
            self.sequences.append((end - begin, keys, self.q_rows, self.kv_rows))
            self.q_rows += end - begin
        self.kv_rows += keys_end

    def shares_keys(self) -> bool:
        return len({kv_row for _, _, _, kv_row in self.sequences}) < len(self.sequences)


def dense(heads: Heads, rows: int, count: int, mask: int) -> Batch:
    size = f"{rows // 1024}K x{count}" if rows % 1024 == 0 else f"one document of {rows} rows"
    batch = Batch(f"{'causal' if mask == CAUSAL else 'full'} {size}", heads)
    for _ in range(count):
        batch.document(rows, [(0, rows)], mask)
    return batch


def packed(heads: Heads, name: str, lengths: list[int]) -> Batch:
    batch = Batch(f"packed {name}, {len(lengths)} documents", heads)
    for rows in lengths:
        batch.document(rows, [(0, rows)])
    return batch


def short_tasks(heads: Heads, rows: int, every: int) -> Batch:
    """Tasks of 128 rows, spread over one document: every `every`-th tile of it."""
    parts = [(begin, begin + 128) for begin in range(128 * (every - 1), rows, 128 * every)]
    batch = Batch(f"{len(parts)} tasks of 128 rows in {rows // 1024}K", heads)
    batch.document(rows, parts)
    return batch


def planned(heads: Heads, name: str, plan: Path, lengths: list[int], slot: int) -> Batch:
    """The tasks that one slot gets in a plan of `cadre plan --out`."""
    tasks = [it for it in json.loads(plan.read_text())["tasks"] if it["slot"] == slot]
    batch = Batch(f"tasks {name}, slot {slot}", heads)
    for document in sorted({it["doc"] for it in tasks}):
        own = [it for it in tasks if it["doc"] == document]
        parts = [tuple(it["q"]) for it in own]
        batch.document(lengths[document], parts, CAUSAL, max(it["k"][1] for it in own))
    sizes = [end - begin for begin, end in ((it.rows_begin, it.rows_end) for it in batch.lines)]
    batch.name += f", {len(sizes)} of {min(sizes)} to {max(sizes)} rows"
    return batch


@dataclass
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @staticmethod
    def random(batch: Batch, device: torch.device, seed: int) -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)

        def rows(count: int, heads: int) -> torch.Tensor:
            shape = (count, heads, batch.heads.dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        heads = batch.heads
        q, dout = rows(batch.q_rows, heads.query), rows(batch.q_rows, heads.query)
        return Tensors(q, rows(batch.kv_rows, heads.kv), rows(batch.kv_rows, heads.kv), dout)


@dataclass
class Results:
    """All poisoned until a kernel writes them."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @staticmethod
    def poisoned(batch: Batch, device: torch.device, gradients: bool = True) -> Results:
        def nan(rows: int, *rest: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows, *rest), float("nan"), device=device, dtype=dtype)

        heads, q, kv = batch.heads, batch.q_rows, batch.kv_rows
        out = nan(q, heads.query, heads.dim, dtype=torch.bfloat16)
        lse = nan(q, heads.query)
        if not gradients:
            q = kv = 0
        return Results(
            out, lse, nan(q, heads.query, heads.dim), nan(kv, heads.kv, heads.dim), nan(kv, heads.kv, heads.dim)
        )


def reference(batch: Batch, tensors: Tensors, dtype: torch.dtype) -> tuple[Results, torch.Tensor]:
    """O, LSE, the gradients and Δ from the definition, in `dtype`; one task and KV head at a time."""
    heads, device = batch.heads, tensors.q.device
    group = heads.query // heads.kv

    def zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.zeros(shape or like.shape, device=device, dtype=dtype)

    out, dq, dk, dv = (zeros(it) for it in (tensors.q, tensors.q, tensors.k, tensors.v))
    lse, delta = (zeros(tensors.q, batch.q_rows, heads.query) for _ in range(2))
    for it in batch.lines:
        count, keys = it.rows_end - it.rows_begin, it.keys_end - it.keys_begin
        rows = torch.arange(it.rows_begin, it.rows_end, device=device)[:, None]
        held = torch.arange(it.keys_begin, it.keys_end, device=device)[None, :]
        kept = torch.ones(count, keys, dtype=torch.bool, device=device)
        if it.mask != FULL:
            kept &= held <= rows
        if it.mask > CAUSAL:
            kept &= held >= rows - (it.mask - 2)
        own, theirs = slice(it.q_row, it.q_row + count), slice(it.kv_row, it.kv_row + keys)
        for kv in range(heads.kv):
            k, v = tensors.k[theirs, kv].to(dtype), tensors.v[theirs, kv].to(dtype)
            for head in range(kv * group, (kv + 1) * group):
                q, dout = tensors.q[own, head].to(dtype), tensors.dout[own, head].to(dtype)
                scores = q @ k.T * heads.scale
                slope = 1.0
                if batch.softcap:
                    capped = torch.tanh(scores / batch.softcap)
                    scores, slope = batch.softcap * capped, 1 - capped**2
                scores = scores.masked_fill(~kept, float("-inf"))
                lse[own, head] = torch.logsumexp(scores, 1)
                p = torch.exp(scores - lse[own, head][:, None]).nan_to_num(0.0)
                out[own, head] = p @ v
                delta[own, head] = (dout * out[own, head]).sum(1)
                ds = p * (dout @ v.T - delta[own, head][:, None]) * slope * heads.scale
                dq[own, head] = ds @ k
                dk[theirs, kv] += ds.T @ q
                dv[theirs, kv] += p.T @ dout
    return Results(out, lse, dq, dk, dv), delta
