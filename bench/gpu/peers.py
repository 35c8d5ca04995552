"""The kernels that Cadre's are measured beside: cuDNN and FlashAttention 2 through PyTorch, cuDNN's ragged graphs, and
FlashAttention 3, which is packed (flash3.py).

In: a batch and its tensors. Out: `Peer`s with a forward and a backward call on tensors of their own, and O for
comparison. A peer that cannot do a batch raises; who asks says so. Copies of keys, graphs and plans are made before
anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases import Batch, Tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

# Peers are asked for a fixed order, not for memory that is filled before they write it: that would be measured, too.
torch.utils.deterministic.fill_uninitialized_memory = False


@dataclass
class Peer:
    name: str
    forward: Callable[[], None]
    backward: Callable[[], None]
    out: Callable[[], torch.Tensor]  # [q rows, heads, dim], after a forward
    fixed_order: bool  # dQ in an order that does not change
    gradients: Callable[[], tuple[torch.Tensor, ...]]  # of Q, K and V as the batch has them, after a backward


def sdpa(batch: Batch, tensors: Tensors, backend: SDPBackend, name: str, fixed: bool) -> Peer:
    """Equal documents as one batch, rows as they lie."""
    (rows, _, _, _), count = batch.sequences[0], len(batch.sequences)
    assert all(it[:2] == (rows, rows) for it in batch.sequences), "SDPA takes equal documents"

    def view(it: torch.Tensor) -> torch.Tensor:
        return it.view(count, rows, *it.shape[1:]).transpose(1, 2)

    q, k, v = (view(it).detach().requires_grad_() for it in (tensors.q, tensors.k, tensors.v))
    dout = view(tensors.dout)
    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        with sdpa_kernel(backend):
            kept["out"] = F.scaled_dot_product_attention(q, k, v, is_causal=batch.causal, enable_gqa=True)

    def backward() -> None:
        torch.use_deterministic_algorithms(fixed)
        kept["gradients"] = torch.autograd.grad(kept["out"], (q, k, v), dout, retain_graph=True)
        torch.use_deterministic_algorithms(False)

    def rows_of(it: torch.Tensor) -> torch.Tensor:
        return it.transpose(1, 2).reshape(-1, it.shape[1], it.shape[3])

    def gradients() -> tuple[torch.Tensor, ...]:
        return tuple(map(rows_of, kept["gradients"]))

    return Peer(name, forward, backward, lambda: rows_of(kept["out"]), fixed, gradients)


def with_own_keys(batch: Batch, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """K and V with a copy of its keys for each sequence, and how many keys each has."""
    keys = [count for _, count, _, _ in batch.sequences]
    if not batch.shares_keys() and sum(keys) == batch.kv_rows:
        return tensors.k, tensors.v, keys
    index = rows_of_keys(batch, tensors)
    return tensors.k[index], tensors.v[index], keys


def rows_of_keys(batch: Batch, tensors: Tensors) -> torch.Tensor:
    return torch.cat([torch.arange(row, row + count) for _, count, _, row in batch.sequences]).to(tensors.k.device)


def of_batch(batch: Batch, tensors: Tensors, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of Q, and of K and V whose rows may be copies: theirs are added."""
    dq, *of_keys = gradients
    if not batch.shares_keys() and len(of_keys[0]) == batch.kv_rows:
        return gradients
    index = rows_of_keys(batch, tensors)

    def added(it: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch.kv_rows, *it.shape[1:], device=it.device).index_add_(0, index, it.float())

    return (dq, *map(added, of_keys))


def offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def flash_varlen(batch: Batch, tensors: Tensors, fixed: bool) -> Peer:
    """FlashAttention 2 as PyTorch carries it, one sequence a task."""
    k, v, keys = with_own_keys(batch, tensors)
    rows = [it[0] for it in batch.sequences]
    of_q, of_k = offsets(rows, k.device), offsets(keys, k.device)
    limits = (max(rows), max(keys))
    scale, kept = batch.heads.scale, {}

    def forward() -> None:
        kept["all"] = torch.ops.aten._flash_attention_forward(
            tensors.q, k, v, of_q, of_k, *limits, 0.0, batch.causal, False, scale=scale
        )

    def backward() -> None:
        out, lse, seed, unused, _ = kept["all"]
        torch.use_deterministic_algorithms(fixed)
        kept["gradients"] = torch.ops.aten._flash_attention_backward(
            tensors.dout, tensors.q, k, v, out, lse, of_q, of_k, *limits, 0.0, batch.causal, seed, unused, scale=scale
        )
        torch.use_deterministic_algorithms(False)

    name = "FA2 varlen" + (" deterministic" if fixed else "")
    gradients = lambda: of_batch(batch, tensors, *kept["gradients"])  # noqa: E731
    return Peer(name, forward, backward, lambda: kept["all"][0], fixed, gradients)


def flash3_of(batch: Batch, tensors: Tensors, fixed: bool, dense: bool) -> Peer:
    """FlashAttention 3; it is on no package index, so it is packed."""
    import flash3

    return flash3.make(batch, tensors, with_own_keys(batch, tensors), fixed, dense)


def cudnn_ragged(batch: Batch, tensors: Tensors, fixed: bool) -> Peer:
    """cuDNN's ragged tensors, one sequence a task; causal ends at the last key."""
    import cudnn

    k, v, keys = with_own_keys(batch, tensors)
    rows = [it[0] for it in batch.sequences]
    heads, count, device = batch.heads, len(rows), k.device
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)

    def column(numbers: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1, 1, 1)

    def ragged(lengths: list[int], of: int) -> torch.Tensor:
        starts = [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
        return column([it * of * heads.dim for it in starts], torch.int64)

    held = {
        "seq_q": column(rows, torch.int32),
        "seq_k": column(keys, torch.int32),
        "ragged_q": ragged(rows, heads.query),
        "ragged_k": ragged(keys, heads.kv),
        "out": torch.empty_like(tensors.q),
        "stats": torch.empty(count, heads.query, max(rows), 1, dtype=torch.float32, device=device),
        "dq": torch.empty_like(tensors.q),
        "dk": torch.empty_like(k),
        "dv": torch.empty_like(v),
    }

    def graph(backward: bool) -> Callable[[], None]:
        it = cudnn.pygraph(
            handle=handle,
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        pack: dict = {}

        def plain(tensor: torch.Tensor):
            made = it.tensor_like(tensor)
            pack[made] = tensor
            return made

        offset_q, offset_k = plain(held["ragged_q"]), plain(held["ragged_k"])

        def shape(of: int, most: int) -> dict:
            dims = [count, of, most, heads.dim]
            return {"dim": dims, "stride": [most * of * heads.dim, heads.dim, of * heads.dim, 1]}

        of_q, of_k = shape(heads.query, max(rows)), shape(heads.kv, max(keys))

        def rows_of(tensor: torch.Tensor, form: dict, offset):
            made = it.tensor(data_type=cudnn.data_type.BFLOAT16, **form)
            made.set_ragged_offset(offset)
            pack[made] = tensor
            return made

        q, keys_in = rows_of(tensors.q, of_q, offset_q), rows_of(k, of_k, offset_k)
        values = rows_of(v, of_k, offset_k)
        common = {
            "attn_scale": heads.scale,
            "use_padding_mask": True,
            "seq_len_q": plain(held["seq_q"]),
            "seq_len_kv": plain(held["seq_k"]),
        }
        if batch.causal:
            common["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
            common["diagonal_band_right_bound"] = 0

        def result(made, tensor: torch.Tensor, form: dict, offset) -> None:
            made.set_output(True).set_dim(form["dim"]).set_stride(form["stride"])
            made.set_data_type(cudnn.data_type.BFLOAT16)
            made.set_ragged_offset(offset)
            pack[made] = tensor

        if backward:
            out, dout = rows_of(held["out"], of_q, offset_q), rows_of(tensors.dout, of_q, offset_q)
            gradients = it.sdpa_backward(
                q=q,
                k=keys_in,
                v=values,
                o=out,
                dO=dout,
                stats=plain(held["stats"]),
                max_total_seq_len_q=(sum(rows) + 63) // 64 * 64,
                max_total_seq_len_kv=(sum(keys) + 63) // 64 * 64,
                use_deterministic_algorithm=fixed,
                **common,
            )
            forms = [("dq", of_q, offset_q), ("dk", of_k, offset_k), ("dv", of_k, offset_k)]
            for made, (name, form, offset) in zip(gradients, forms):
                result(made, held[name], form, offset)
        else:
            out, stats = it.sdpa(q=q, k=keys_in, v=values, generate_stats=True, **common)
            result(out, held["out"], of_q, offset_q)
            form = held["stats"]
            stats.set_output(True).set_dim(list(form.shape)).set_stride(list(form.stride()))
            stats.set_data_type(cudnn.data_type.FLOAT)
            pack[stats] = form
        it.validate()
        it.build_operation_graph()
        it.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        it.check_support()
        it.build_plans()
        space = torch.empty(max(it.get_workspace_size(), 1), dtype=torch.uint8, device=device)
        return lambda: it.execute(pack, space, handle=handle)

    name = "cuDNN ragged" + (" deterministic" if fixed else "")
    gradients = lambda: of_batch(batch, tensors, held["dq"], held["dk"], held["dv"])  # noqa: E731
    return Peer(name, graph(False), graph(True), lambda: held["out"], fixed, gradients)


def candidates(batch: Batch) -> list[tuple[str, Callable[[Batch, Tensors], Peer]]]:
    """What to measure a batch beside: names, and how to make the peers."""
    lengths = {it[:2] for it in batch.sequences}
    if len(lengths) == 1 and all(rows == keys for rows, keys in lengths):
        cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
        return [
            ("cuDNN", lambda b, t: sdpa(b, t, cudnn, "cuDNN", False)),
            ("FA2", lambda b, t: sdpa(b, t, flash, "FA2", False)),
            ("FA2 deterministic", lambda b, t: sdpa(b, t, flash, "FA2 deterministic", True)),
            ("FA3", lambda b, t: flash3_of(b, t, False, True)),
            ("FA3 deterministic", lambda b, t: flash3_of(b, t, True, True)),
            ("cuDNN ragged deterministic", lambda b, t: cudnn_ragged(b, t, True)),
        ]
    return [
        ("cuDNN ragged", lambda b, t: cudnn_ragged(b, t, False)),
        ("FA2 varlen", lambda b, t: flash_varlen(b, t, False)),
        ("FA2 varlen deterministic", lambda b, t: flash_varlen(b, t, True)),
        ("FA3 varlen", lambda b, t: flash3_of(b, t, False, False)),
        ("FA3 varlen deterministic", lambda b, t: flash3_of(b, t, True, False)),
        ("cuDNN ragged deterministic", lambda b, t: cudnn_ragged(b, t, True)),
    ]
