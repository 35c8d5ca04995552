"""Core attention of torchtitan's models, by its overrides.

    torchtitan ... --override.imports cadre.torchtitan.attention

In: a model whose attention backend is `varlen`. Out: O, as its layers want it, from the pool. Documents are those of
torchtitan's metadata, which have to be the announced ones. Data parallel, sharded or not: torchtitan itself refuses
context parallel for `varlen`, and heads that tensor parallel divides are refused by their number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from ._attention import attend
from ._layout import Kind, Shape, mask_of, refuse
from ._mistakes import names_rank


class Attention(VarlenAttention):
    """See the module."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Configuration without sharding: K and V stay on the rank that made them."""

    def __init__(self, config: Config) -> None:
        torch.nn.Module.__init__(self)
        # No implementation of FlashAttention is looked for.
        self.window_size = config.window_size

    @names_rank
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **more: Any,
    ) -> Tensor:
        del enable_gqa
        refuse(**more)
        batch, rows = q_BLNH.shape[:2]
        q, k, v = (it.flatten(0, 1) for it in (q_BLNH, k_BLNH, v_BLNH))
        ends = (attention_masks.cu_seq_q, attention_masks.cu_seq_k)
        mask = mask_of(causal=False, window_size=self.window_size)
        o, lse = attend(q, k, v, *ends, mask=mask, scale=scale)
        o, lse = o.unflatten(0, (batch, rows)), lse.unflatten(0, (batch, rows))
        return out_transform(o, lse) if out_transform else o


@override(target=VarlenAttention.Config, description="core attention on a pool of Cadre's")
def attention(config: VarlenAttention.Config) -> Attention.Config:
    return derive(config, Attention.Config)


def shape(config: Any) -> Shape:
    """The argument of `cadre.init`, from the configuration of a model whose layers all have attention."""
    each = [it.attention for it in config.layers]
    first = each[0]
    heads, kv_heads = first.n_heads, first.n_kv_heads or first.n_heads

    def kind(it: Any) -> Kind:
        window, own = it.inner_attention.window_size, (it.n_heads, it.n_kv_heads or it.n_heads)
        return Kind(mask_of(causal=False, window_size=window), heads=own, head_dim=it.head_dim)

    kinds = tuple(kind(it) for it in each)
    return Shape(heads, kv_heads, first.head_dim or config.dim // heads, kinds)
