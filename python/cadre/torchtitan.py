"""Core attention of torchtitan's models, by its overrides.

    torchtitan ... --override.imports cadre.torchtitan.attention

In: a model whose attention backend is `varlen`. Out: O, as its layers want it, from the pool. Documents are those of
torchtitan's metadata, which have to be the announced ones. A layer knows its number once `shape` has given it one.
Data parallel, sharded or not: torchtitan itself refuses context parallel for `varlen`, and heads that tensor parallel
divides are refused by their number.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from ._attention import attend
from ._kind import Kind, mask_of
from ._layout import Shape, refuse
from ._mistakes import names_rank


class Attention(VarlenAttention):
    """See the module."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Configuration without sharding: K and V stay on the rank that made them."""

        layer: int | None = None
        """Number of the layer, which `shape` gives it."""

    def __init__(self, config: Config) -> None:
        torch.nn.Module.__init__(self)
        # No implementation of FlashAttention is looked for.
        self.window_size = config.window_size
        # Not a buffer: it is no part of a checkpoint, and stays on the CPU. A tensor: blocks have one compilation.
        self.layer = None if config.layer is None else torch.tensor(config.layer, device="cpu")

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
        with_lse = out_transform is not None
        o, lse = attend(q, k, v, *ends, mask=mask, scale=scale, layer=self.layer, with_lse=with_lse)
        o = o.unflatten(0, (batch, rows))
        return out_transform(o, lse.unflatten(0, (batch, rows))) if out_transform else o


@override(target=VarlenAttention.Config, description="core attention on a pool of Cadre's")
def attention(config: VarlenAttention.Config) -> Attention.Config:
    return derive(config, Attention.Config)


def shape(of: Any) -> Shape:
    """The argument of `cadre.init`, from the configuration of a model whose layers all have attention, or from the
    model. Layers that have Cadre's attention get their numbers; after a configuration, those of models that are built
    from it later."""
    if isinstance(of, torch.nn.Module):
        for at, it in enumerate(it for it in of.modules() if isinstance(it, Attention)):
            it.layer = torch.tensor(at, device="cpu")
        config = of.config
    else:
        config = of
        config.layers[:] = [_numbered(it, at) for at, it in enumerate(config.layers)]
    each = [it.attention for it in config.layers]
    first = each[0]
    heads, kv_heads = first.n_heads, first.n_kv_heads or first.n_heads

    def kind(it: Any) -> Kind:
        window, own = it.inner_attention.window_size, (it.n_heads, it.n_kv_heads or it.n_heads)
        return Kind(mask_of(causal=False, window_size=window), heads=own, head_dim=it.head_dim)

    kinds = tuple(kind(it) for it in each)
    return Shape(heads, kv_heads, first.head_dim or config.dim // heads, kinds)


def _numbered(layer: Any, at: int) -> Any:
    """The configuration of a layer with its number. A copy: layers may share configurations."""
    inner = layer.attention.inner_attention
    if not isinstance(inner, Attention.Config):
        return layer
    return replace(layer, attention=replace(layer.attention, inner_attention=replace(inner, layer=at)))
