"""Attention of transformers: importing this module puts `cadre` among its implementations.

    import cadre.transformers
    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="cadre"))

In: rotated Q, K and V of a layer. Out: O, as the model wants it. Documents are those of the step; outside of a step
and under `local()` they are `cu_seq_lens_q`, as transformers' collator for packed batches makes it, or the rows of
the batch if there are several.

An argument that nobody here knows, and a mask that is more than causal, a window, chunks, or full, is refused by its
name. Chunks are those of a document, which transformers' own masks count from the first row of the batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as masks

from ._attention import attend
from ._kind import mask_of
from ._layout import refuse, refuse_widths
from ._mistakes import names_rank

# What models hand down to every layer, and core attention does not depend on.
_HARMLESS = {
    *("position_ids", "position_embeddings", "cache_position", "max_length_q", "max_length_k", "seq_idx"),
    *("num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "return_dict", "output_hidden_states"),
    *("output_router_logits", "use_cache", "deterministic", "layer_idx", "training"),
}


@names_rank
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers: takes `[batch, heads, rows, dim]`, returns `[batch, rows, heads, dim]`."""
    refuse(dropout=dropout, **{name: it for name, it in more.items() if name not in _HARMLESS})
    batch, heads, rows, dim = query.shape
    refuse_widths(q=dim, k=key.shape[-1], v=value.shape[-1])
    if key.shape[2] != rows:
        raise NotImplementedError(
            f"q has {rows} rows and K {key.shape[2]}: keys of a cache are not there; give use_cache=False, or generate "
            'after model.set_attn_implementation("sdpa")'
        )
    several, chunk = cu_seq_lens_q is None and batch > 1, _chunk_of(module)
    if attention_mask is not None:
        _check_mask(attention_mask, several, chunk)
    if several:
        cu_seq_lens_q = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cpu")
    q, k, v = (it.transpose(1, 2).reshape(-1, it.shape[1], dim) for it in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (-1, -1)
    if sliding_window is not None:
        if sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}; a window has 1 row or more, its own key")
        # A window that looks both ways has `sliding_window` rows on each side.
        window = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    how: dict[str, Any] = {"mask": mask_of(causal, window), "chunk": chunk, "scale": scaling, "softcap": softcap}
    how |= {"sinks": s_aux, "layer": getattr(module, "cadre_layer", None), "with_lse": False}
    o, _lse = attend(q, k, v, cu_seq_lens_q, cu_seq_lens_k, **how)
    return o.view(batch, rows, heads, dim), None


def _chunk_of(module: nn.Module) -> int | None:
    """Rows of a layer's chunks, which no model hands down to it but in the mask."""
    config, layer = (getattr(module, it, None) for it in ("config", "layer_idx"))
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and layer is not None and kinds[layer] == "chunked_attention" else None


def _check_mask(mask: Tensor, several: bool, chunk: int | None) -> None:
    if mask.dtype == torch.int64 and mask.dim() == 4 and chunk is None:
        raise NotImplementedError(
            "attention_mask: it has chunks, and the module's layer_idx and config.layer_types do not say so; give the "
            'model attn_implementation="sdpa"'
        )
    if mask.dim() not in (3, 4) or mask.dtype != torch.int64:
        raise NotImplementedError("attention_mask: padding is not there; pack the documents of a batch in one row")
    if several:
        # Not an `if`: a compiled model learns it at run time.
        torch._assert_async(
            (mask == 0).all(),
            "position_ids begin again inside a row of the batch, and nothing says where its documents end: "
            "pass cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True))",
        )


@names_rank
def _transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = masks.causal_mask_function,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> Tensor | None:
    """None for what a layer's own arguments say: causal, a causal window, all rows. The number of its document for
    each row, `[batch, 1, rows]`, where position ids begin again: for `attention` to compare. Where the mask has chunks,
    with one more dimension, so that `attention` sees whether the layer says so."""
    packed, chunked = None, False
    for it in _parts(mask_function):
        name = it.__qualname__.split(".")[0]
        if name == "chunked_overlay":
            chunked = True
            continue
        if name == "packed_sequence_mask_function":
            packed = _held(it)["packed_sequence_mask"][:, None]
        elif name not in ("causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay"):
            raise NotImplementedError(
                f"this model's attention mask has a part `{name}`, and masks are causal, causal windows or full here; "
                'give the model attn_implementation="sdpa"'
            )
    padding = masks.flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **more
    )
    if padding is not None or not chunked:
        return packed if padding is None else padding
    return torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu") if packed is None else packed[..., None]


def _held(function: Any) -> dict[str, Any]:
    """Variables that a nested function has captured."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: it.cell_contents for name, it in cells}


def _parts(function: Callable) -> Iterator[Callable]:
    """Mask functions that are combined by "and"."""
    name = function.__qualname__.split(".")[0]
    if name == "and_masks":
        for it in _held(function)["mask_functions"]:
            yield from _parts(it)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(_held(function)["mask_function"])
    else:
        yield function


AttentionInterface.register("cadre", attention)
# Without it transformers would silently pass no mask where there is padding.
AttentionMaskInterface.register("cadre", _transformers_mask)
