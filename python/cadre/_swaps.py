"""Further faces of attention, for models that are not to be changed: FlashAttention's for batches, and PyTorch's.

In: the arguments of these, in their order. Out: what they return. `install` puts them, and FlashAttention's for packed
rows, in the place of the originals, wherever a module holds these.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._attention import attend, flash_attn_varlen_func
from ._kind import mask_of
from ._layout import refuse
from ._mistakes import names_rank


@names_rank
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options: Any, **more: Any) -> Any:
    """FlashAttention 2's function for batches, `[batch, rows, heads, dim]`: a row of the batch is a document. Options
    are those of `flash_attn_varlen_func` behind its lengths, in FlashAttention's order; so is what it returns."""
    if q.dim() != 4 or q.shape[:2] != k.shape[:2]:
        raise ValueError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}; give [batch, rows, heads, dim], of equal rows")
    batch, rows = q.shape[:2]
    if rows:
        ends = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cpu")
    else:
        # The rank has no documents of the micro-batch, or it is refused below.
        ends = torch.zeros(1, dtype=torch.int32, device="cpu")
    q, k, v = (it.flatten(0, 1) for it in (q, k, v))
    packed = flash_attn_varlen_func(q, k, v, ends, ends, rows, rows, *options, **more)
    if isinstance(packed, Tensor):
        return packed.view(batch, rows, *packed.shape[1:])
    o, lse, _ = packed
    return o.view(batch, rows, *o.shape[1:]), lse.reshape(len(lse), batch, rows).transpose(0, 1), None


# Callers that ask which options it takes, as transformers does, see them by name.
_options = inspect.signature(flash_attn_varlen_func)
flash_attn_func.__dict__["__signature__"] = _options.replace(
    parameters=[it for name, it in _options.parameters.items() if not name.startswith(("cu_seqlens", "max_seqlen"))]
)


@names_rank
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool | None = None,
    return_aux: Any = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.attention.varlen.varlen_attn`, as torch 2.10 has it (`is_causal`, by position too) and as later ones
    do, in which the window (-1, 0) is causal. `num_splits` changes no result here."""
    del max_q, max_k, num_splits
    refuse(seqused_k=seqused_k, block_table=block_table)
    # Torch 2.10 does not ask.
    if is_causal is None and not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True")
    mask = mask_of(causal=bool(is_causal), window_size=window_size)
    with_lse = return_aux is not None and return_aux.lse
    o, lse = attend(query, key, value, cu_seq_q, cu_seq_k, mask=mask, scale=scale, with_lse=with_lse)
    return (o, lse.transpose(0, 1)) if with_lse else o


# Functions that have a double here, by their module.
_DOUBLES: dict[tuple[str, str], Callable] = {
    ("flash_attn", "flash_attn_func"): flash_attn_func,
    ("flash_attn", "flash_attn_varlen_func"): flash_attn_varlen_func,
    ("torch.nn.attention.varlen", "varlen_attn"): varlen_attn,
}


def install() -> list[str]:
    """Puts Cadre's attention in the place of FlashAttention's and PyTorch's, in every module that holds one of these,
    and among the implementations of transformers (`attn_implementation="cadre"`). Returns the names that it replaced.

    What is not installed is left out. Call it once, before a model is compiled or made.
    """
    replaced = []
    for (home, name), ours in _DOUBLES.items():
        if home not in sys.modules and not _is_there(home):
            continue
        original = getattr(importlib.import_module(home), name, None)
        if original is None or original is ours:
            continue
        for module in list(sys.modules.values()):
            for known, it in list(getattr(module, "__dict__", {}).items()):
                if it is original:
                    setattr(module, known, ours)
                    replaced.append(f"{module.__name__}.{known}")
    if _is_there("transformers"):
        importlib.import_module("cadre.transformers")
        replaced.append("transformers: cadre")
    return replaced


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
