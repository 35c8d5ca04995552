"""Core attention of Megatron-core: `CoreAttention` takes the place of its own in the spec of a layer.

    spec = get_gpt_layer_local_spec(...)
    cadre.megatron.put_into(spec)
    model = GPTModel(config, spec, ...)
    cadre.init(cadre.megatron.shape(config), steps=...)

In: rows of Q, K and V as Megatron lays them out, `[rows, batch, heads, dim]`, or `[rows, heads, dim]` of packed
documents. Out: O, the heads of a row side by side. Documents are those of the step; outside of one, the columns of the
batch or `PackedSeqParams`. Data parallel: what divides heads, rows or layers among processes is refused by name.
"""

import weakref
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from . import _job, _local
from ._attention import attend
from ._kind import Kind, mask_of
from ._layout import Shape, refuse, refuse_widths
from ._mistakes import names_rank

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


@names_rank
def shape(of: TransformerConfig | nn.Module) -> Shape:
    """The argument of `cadre.init` for a configuration of Megatron, or for a model that has Cadre's attention. The
    model's layers with attention are numbered as they come; its other ones have no number."""
    if isinstance(of, nn.Module):
        return _shape_of(of)
    config = of
    if getattr(config, "is_hybrid_model", False):
        raise NotImplementedError(
            "is_hybrid_model is True: the configuration does not say which layers have attention; give the model in "
            "its place, and make it before cadre.init"
        )
    return Shape(
        query_heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        kinds=(Kind(scale=config.softmax_scale),) * config.num_layers,
    )


def _shape_of(model: nn.Module) -> Shape:
    layers = [it for it in model.modules() if isinstance(it, CoreAttention)]
    if not layers:
        raise TypeError(
            f"init: {type(model).__name__} has no layer with cadre.megatron.CoreAttention; put it into the layers' spec"
        )
    for at, it in enumerate(layers):
        # Megatron's number counts layers without attention, too.
        it.layer = torch.tensor(at, device="cpu")
    config = layers[0].config
    return Shape(
        query_heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        kinds=tuple(Kind(mask_of(it.mask in _CAUSAL, (-1, -1)), scale=it.scale) for it in layers),
    )


def put_into(spec: ModuleSpec) -> ModuleSpec:
    """Puts Cadre's attention into the spec of a layer, or of each layer of a block, or of a hybrid stack's layers."""
    for it in getattr(spec, "layer_specs", None) or [getattr(spec.submodules, "attention_layer", spec)]:
        it.submodules.self_attention.submodules.core_attention = CoreAttention
    return spec


def check(config: TransformerConfig) -> None:
    """Refuses features of the configuration that are missing here, by name."""
    if getattr(config, "multi_latent_attention", False):
        wide = config.qk_head_dim + config.qk_pos_emb_head_dim
        refuse_widths("multi_latent_attention: ", q=wide, v=config.v_head_dim)
    for name, usual in (
        ("tensor_model_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
        ("attention_dropout", 0.0),
        ("apply_query_key_layer_scaling", False),
        ("softmax_type", "vanilla"),
        ("window_size", None),
        ("multi_latent_attention", False),
        # Rows of a document on as many ranks as its length asks for.
        ("hybrid_context_parallel", False),
        ("dynamic_context_parallel", False),
        # A `BasePackingScheduler`, which no release up to 0.19.2 has: it draws and packs the documents of an update
        # within the training step, too late to announce them. `cadre.batches` announces what a loader has packed.
        ("sequence_packing_scheduler", None),
    ):
        if (value := getattr(config, name, usual)) != usual:
            raise NotImplementedError(f"{name} is {value}: it is not there yet; set it to {usual}")


# The mask that was found right last, and the number of its changes then: all layers of a micro-batch have the same one.
_RIGHT: list[tuple[weakref.ref, int]] = []
# Rows of a mask that are compared at once.
_AT_ONCE = 1024


def _check_mask_once(mask: Tensor, rows: int, *, packed: bool) -> None:
    if torch.compiler.is_compiling():
        return _check_mask(mask, rows, packed=packed)
    # Those of `torch.inference_mode` do not count their changes.
    counts = not mask.is_inference()
    if counts and not packed and any(it() is mask and changes == mask._version for it, changes in _RIGHT):
        return None
    _check_mask(mask, rows, packed=packed)
    _RIGHT[:] = [(weakref.ref(mask), mask._version)] if counts else []
    return None


def _check_mask(mask: Tensor, rows: int, *, packed: bool) -> None:
    """Checks a mask of Megatron, which is true where a key is hidden."""
    remedy = "give the step's documents (layout), or PackedSeqParams, and no mask of padding or of reset_attention_mask"
    if packed or mask.dtype != torch.bool or mask.shape[-2:] != (rows, rows):
        raise NotImplementedError(f"attention_mask {tuple(mask.shape)} beside a causal layer: {remedy}")
    row = torch.arange(rows, device=mask.device)
    for of, some in zip(row.split(_AT_ONCE), mask.split(_AT_ONCE, -2), strict=True):
        same = (some == (row[None] > of[:, None])).all()
        # Not an `if`: a GPU is not waited for.
        torch._assert_async(same, f"attention_mask hides other keys than a causal layer does: {remedy}")


class CoreAttention(nn.Module):
    """See the module."""

    @names_rank
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        check(config)
        refuse(attention_dropout=attention_dropout)
        if attention_type != "self":
            raise NotImplementedError(f"attention_type is {attention_type}: attention is of a layer's own rows here")
        self.config, self.mask, self.scale = config, attn_mask_type, softmax_scale
        # Not a buffer: it is no part of a checkpoint, and stays on the CPU. Megatron counts layers from 1, also those
        # without attention: `shape` of a model numbers them anew.
        self.layer = torch.tensor(layer_number - 1, device="cpu")

    @names_rank
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Megatron calls this. `attention_mask` has to be causal."""
        refuse(attention_bias=attention_bias)
        mask = attn_mask_type or self.mask
        if mask in _CAUSAL and attention_mask is not None:
            _check_mask_once(attention_mask, query.shape[0], packed=query.dim() == 3)
        if mask not in _CAUSAL and (mask != AttnMaskType.no_mask or attention_mask is not None):
            raise NotImplementedError(f"attn_mask_type is {mask}: layers are causal, or have no mask, here")
        packed = query.dim() == 3
        rows, batch = query.shape[0], 1 if packed else query.shape[1]
        ends = ends_of_keys = None
        if packed:
            if packed_seq_params is None:
                raise ValueError("packed rows without packed_seq_params; give their PackedSeqParams")
            ends, ends_of_keys = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
        elif packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            raise NotImplementedError(
                f"packed_seq_params of qkv_format {packed_seq_params.qkv_format}: columns are whole documents here; "
                "pack them in one row (thd)"
            )
        elif batch > 1 or _job.running() is None or _local.under_local():
            ends = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cpu")
        if not packed:
            query, key, value = (it.transpose(0, 1).flatten(0, 1) for it in (query, key, value))
        mask = mask_of(causal=mask in _CAUSAL, window_size=(-1, -1))
        how: dict[str, Any] = {"mask": mask, "scale": self.scale, "layer": self.layer, "with_lse": False}
        o, _lse = attend(query, key, value, ends, ends_of_keys, **how)
        o = o.flatten(1)
        return o if packed else o.unflatten(0, (batch, rows)).transpose(0, 1).contiguous()
