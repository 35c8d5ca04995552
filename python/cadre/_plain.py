"""Plain attention, which `cadre check` compares with: scores of every row with every key of its document, in torch.

In: rows of Q, K and V, lengths of documents, a kind of layers as text. Out: O and LSE, and their gradients. It shares
no code with the kernels, and takes the memory of all scores of a document and a KV head.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

_KIND = re.compile(r"(causal|full|window:(\d+))(?: in chunks of (\d+))?(?: scale (\S+))?(?: softcap (\S+))?")


class _Head:
    """A document and KV head, with the query heads that share it: `[heads, rows, dim]` and `[rows, dim]`, in f32."""

    def __init__(self, kind: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        mask, window, chunk, scale, softcap = _KIND.fullmatch(kind).groups()
        self.q, self.k, self.v = q.float().transpose(0, 1), k.float(), v.float()
        self.scale = float(scale) if scale else q.shape[-1] ** -0.5
        rows = torch.arange(q.shape[0], device=q.device)
        before = rows[:, None] - rows[None]
        self.keeps = before >= 0 if mask != "full" else torch.ones_like(before, dtype=torch.bool)
        if window:
            self.keeps &= before < int(window)
        if chunk:
            self.keeps &= rows[:, None] // int(chunk) == rows[None] // int(chunk)
        scores = self.q @ self.k.T * self.scale
        # What softcap's derivative is, too.
        self.capped = 1.0
        if softcap:
            bent = torch.tanh(scores / float(softcap))
            scores, self.capped = bent * float(softcap), 1 - bent**2
        scores = scores.masked_fill(~self.keeps, -torch.inf)
        self.lse = scores.logsumexp(-1)
        self.p = (scores - self.lse[..., None]).exp()

    def gradients(self, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dout = dout.float().transpose(0, 1)
        delta = (dout * (self.p @ self.v)).sum(-1) - dlse.T
        ds = self.p * (dout @ self.v.T - delta[..., None]) * self.capped * self.scale
        dk, dv = (ds.transpose(1, 2) @ self.q).sum(0), (self.p.transpose(1, 2) @ dout).sum(0)
        return (ds @ self.k).transpose(0, 1), dk, dv


def _heads(kind: str, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, int, _Head]]:
    share, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        rows = slice(start, start + length)
        for kv in range(k.shape[1]):
            heads = slice(kv * share, (kv + 1) * share)
            yield rows, heads, kv, _Head(kind, q[rows, heads], k[rows, kv], v[rows, kv])
        start += length


def forward(kind: str, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # As the operators' fakes have it, whatever the rows' distances are.
    o, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, heads, _, it in _heads(kind, lengths, q, k, v):
        o[rows, heads] = (it.p @ it.v).transpose(0, 1).to(o.dtype)
        lse[rows, heads] = it.lse.T
    return o, lse


def backward(
    kind: str, lengths: list[int], qkv: tuple[Tensor, Tensor, Tensor], dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (it.new_empty(it.shape) for it in qkv)
    for rows, heads, kv, it in _heads(kind, lengths, *qkv):
        of_q, of_k, of_v = it.gradients(dout[rows, heads], dlse[rows, heads])
        dq[rows, heads], dk[rows, kv], dv[rows, kv] = of_q.to(dq.dtype), of_k.to(dk.dtype), of_v.to(dv.dtype)
    return dq, dk, dv
