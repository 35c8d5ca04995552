"""Attention that this process computes itself, of documents that lie whole in the rows.

In: rows of Q, K and V on the CPU or a GPU, rounded to the job's wire type. Out: O and LSE, or dQ, dK and dV, in the
types of the inputs, with the bits of servers that compute on such a processor (dK and dV but for the order of sums).
"""

import torch
from torch import Tensor

from . import _frozen, _job, _native, _place


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`contiguous` and `to` for tensors that mostly are right already: each call of torch would cost a microsecond."""
    tensor = tensor if tensor.dtype == dtype else tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _wire(tensor: Tensor) -> torch.dtype:
    """Type to which rows are rounded: the job's wire type; none without a job."""
    return _job.current().wire if _job.is_joined() else tensor.dtype


def forward(kind: str, lengths: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wire, wide = _wire(q), torch.float32
    if behind := _place.kernels(q, wire):
        return _place.forward(behind, kind, lengths, q, k, v)
    if q.is_cuda:
        if _frozen.watched() is None:
            _place.say_on_host(q, wire, of_job=_job.is_joined())
        return _place.on_host(forward, kind, lengths, q, k, v)
    batch, dtype, (rows, heads, _) = (kind, torch.get_num_threads(), lengths), q.dtype, q.shape
    if dtype == wire == wide and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        # Mostly nothing is to be cast, and torch would take a microsecond for each.
        o, lse = torch.empty_like(q), q.new_empty(rows, heads)
        _native.local_forward(batch, (q, k, v), (o, lse))
        return o, lse
    qkv = (_as(q, wire), _as(k, wire), _as(v, wire))
    o = torch.empty(q.shape, dtype=wide, device="cpu")
    lse = o.new_empty(rows, heads)
    _native.local_forward(batch, qkv, (o, lse))
    return _as(_as(o, wire), dtype), lse


def backward(
    kind: str,
    lengths: list[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wire, wide = _wire(q), torch.float32
    if behind := _place.kernels(q, wire):
        return _place.backward(behind, kind, lengths, (q, k, v), (o, lse, dout, dlse))
    if q.is_cuda:
        return _place.on_host(backward, kind, lengths, q, k, v, o, lse, dout, dlse)
    batch, dtype = (kind, torch.get_num_threads(), lengths), q.dtype
    if dtype == wire == wide == dout.dtype and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        dout = dout if dout.is_contiguous() else dout.contiguous()
        results = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        dlse = None if dlse is None else _as(dlse, wide)
        _native.local_backward(batch, (q, k, v), (o, lse, dout, dout, dlse), results)
        return results
    qkv = (_as(q, wire), _as(k, wire), _as(v, wire))
    wide_dout = _as(dout, wide)
    on_wire = wide_dout if wire == wide else _as(dout, wire)
    given = (_as(o, wide), _as(lse, wide), wide_dout, on_wire, None if dlse is None else _as(dlse, wide))
    dq, dk, dv = results = tuple(torch.empty(it.shape, dtype=wide, device="cpu") for it in qkv)
    _native.local_backward(batch, qkv, given, results)
    # dQ comes back from a pool in the wire type, dK and dV as parts in f32.
    return _as(_as(dq, wire), dtype), _as(dk, k.dtype), _as(dv, v.dtype)
