"""What a model and its batches look like to the pool: layers, and where documents lie.

In: a model of transformers, a batch, ends of documents. Out: a `Shape`; lengths. It knows of no job and no step.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypeAlias

import torch

from ._kind import Kind, check_heads, kind_of, kinds_of
from ._mistakes import names_rank


def refuse(**arguments: object) -> None:
    """Refuses an argument that asks for a missing feature."""
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            said = "a tensor" if isinstance(value, torch.Tensor) else value
            raise NotImplementedError(f"{name} is {said}: it is not there yet; leave it out")


def refuse_widths(where: str = "", *, q: int, **others: int) -> None:
    """Refuses heads of other widths than those of Q, such as those of latent attention (MLA)."""
    for name, it in others.items():
        if it != q:
            raise NotImplementedError(
                f"{where}heads of {name} are {it} wide and those of q {q}: all three are of one width here. Pad the "
                "narrow ones to the widest with zeros, give the scale of yours, and cut O to the width of V; or leave "
                "such layers their own attention"
            )


def one_of(**names: torch.Tensor | None) -> torch.Tensor | None:
    """The argument that is given, of several names of one."""
    given = [name for name, it in names.items() if it is not None]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} are given; they are names of one argument: give one")
    return names[given[0]] if given else None


@dataclass(frozen=True)
class Shape:
    """Core attention of a model: heads, and the kind of each layer. A mask alone is a kind, too."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kinds: tuple[str | Kind, ...]
    frozen: int = 0
    """First layers that have no backward: nothing that is trained lies before their attention."""
    heads: tuple[tuple[int, int, int], ...] = ()
    """Query heads, KV heads and head dim of each layer, of what is said above."""

    @names_rank
    def __post_init__(self) -> None:
        kinds = kinds_of("Shape", self.kinds)
        dims = (self.head_dim if it.head_dim is None else it.head_dim for it in kinds)
        own = ((it.heads or (self.query_heads, self.kv_heads), dim) for it, dim in zip(kinds, dims, strict=True))
        heads = self.heads or tuple((query, kv, dim) for (query, kv), dim in own)
        if len(heads) != len(kinds):
            raise ValueError(f"Shape: {len(kinds)} layers have kinds and {len(heads)} heads; leave heads to the kinds")
        if not 0 <= self.frozen <= len(kinds):
            raise ValueError(f"Shape: frozen is {self.frozen} of {len(kinds)} layers; say how many have no backward")
        for layer, it in enumerate(heads):
            check_heads(f"Shape: layer {layer}", *it)
        pairs = zip(heads, kinds, strict=True)
        told = (kind_of(dim, it.mask, it.chunk, it.scale, it.softcap) for (_, _, dim), it in pairs)
        object.__setattr__(self, "kinds", tuple(told))
        object.__setattr__(self, "heads", heads)

    @classmethod
    def of(cls, model: Any) -> "Shape":
        """Reads the configuration of a model of transformers."""
        if isinstance(model, cls):
            return model
        whole = inside(model)
        model = reads_text(whole)
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "num_attention_heads"):
            raise TypeError(
                f"init: {type(model).__name__} has no configuration of transformers; give a cadre.Shape in its place"
            )
        inner = model.modules() if isinstance(model, torch.nn.Module) else ()
        causal = [getattr(it, "is_causal", True) for it in (config, *inner)]
        if getattr(whole.config, "is_encoder_decoder", False) or not all(causal):
            raise NotImplementedError(
                f"init: {type(model).__name__} is not causal in all of its layers; give a cadre.Shape in its place"
            )
        if (divided := getattr(whole, "_tp_size", None) or 1) > 1:
            raise NotImplementedError(
                f"init: tensor parallel is not there yet, and the model's tp_size is {divided}; set it to 1"
            )
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        # Gemma's and Granite's names. Others say it in the modules alone: Gemma 3n, and where yarn has an mscale.
        scalar, scale = (getattr(config, it, None) for it in ("query_pre_attn_scalar", "attention_multiplier"))
        usual = scalar**-0.5 if scalar is not None else scale
        softcap = getattr(config, "attn_logit_softcapping", None)
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        masks = {
            "full_attention": "causal",
            "sliding_attention": f"window:{window}",
            # Llama 4.
            "chunked_attention": "causal",
        }
        chunks = {"chunked_attention": getattr(config, "attention_chunk_size", None)}
        # Without kinds all layers have the window, if there is one: Mistral, Phi3.
        every = getattr(config, "layer_types", None) or [list(masks)[window is not None]] * layers
        kinds = [it for it in every if it not in _WITHOUT]
        modules = _attention_modules(model, _with_attention(model))
        scales = [it.scaling for it in modules] or [usual] * len(kinds)
        # Some layers are wider than the others, or share their keys among more query heads.
        dims = [getattr(it, "qk_head_dim", getattr(it, "head_dim", None)) for it in modules] or [None] * len(kinds)
        if getattr(config, "_attn_implementation", None) == "cadre":
            for it in (it for it in modules if hasattr(it, "qk_head_dim") and hasattr(it, "v_head_dim")):
                refuse_widths("init: ", q=it.qk_head_dim, v=it.v_head_dim)
        groups = [getattr(it, "num_key_value_groups", None) for it in modules] or [None] * len(kinds)
        own = [(heads, heads // it) if it else None for it in groups]
        if unknown := sorted(set(kinds) - set(masks)):
            raise NotImplementedError(f"init: layers of kind {unknown[0]} are not there yet; give a cadre.Shape")
        if window is None and "sliding_attention" in kinds:
            raise NotImplementedError("init: layers slide and sliding_window is None; give a cadre.Shape")
        return cls(
            query_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kinds=tuple(
                Kind(masks[it], chunks.get(it), scale=scale, softcap=softcap, heads=both, head_dim=dim)
                for it, scale, both, dim in zip(kinds, scales, own, dims, strict=True)
            ),
        )


# Types of layers without core attention, as transformers names them.
_WITHOUT = ("linear_attention", "conv", "moe")


def _with_attention(model: Any) -> list[int]:
    """Layers of a model of transformers that have core attention."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [at for at, it in enumerate(kinds) if it not in _WITHOUT]


def _attention_modules(model: Any, layers: list[int]) -> list[torch.nn.Module]:
    """The attention modules of a model of transformers; none unless each layer has exactly one."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    known = [it for it in modules if isinstance(getattr(it, "layer_idx", None), int) and hasattr(it, "scaling")]
    found = [it for it in known if it.layer_idx in layers]
    found.sort(key=lambda it: it.layer_idx)
    return found if [it.layer_idx for it in found] == layers else []


_ROWS = (torch.float32, torch.bfloat16)


def rows_of(model: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that rows of the model's attention have: what is said, or autocast's, or that of its parameters."""
    if dtype is not None:
        if dtype not in _ROWS:
            raise ValueError(f"init: dtype is {dtype}; rows are torch.float32 or torch.bfloat16")
        return dtype
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    first = next((it for it in parameters if it.is_floating_point()), None)
    device = "cpu" if first is None else first.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif first is not None:
        dtype = first.dtype
    # Others are refused when a call has them.
    return dtype if dtype in _ROWS else None


def inside(model: Any) -> Any:
    """The model of transformers inside of wrappers that do not show its configuration, such as DDP's."""
    while isinstance(model, torch.nn.Module) and not hasattr(model, "config"):
        if not isinstance(below := getattr(model, "module", None), torch.nn.Module):
            break
        model = below
    return model


def reads_text(model: Any) -> Any:
    """The part of a model of transformers that reads text, where others read images or sound. Attention of these is
    none of the pool's, and is refused where it is Cadre's, too."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is config or not isinstance(model, torch.nn.Module):
        return model
    for name, it in vars(config).items():
        if it is not text and "cadre" in str(getattr(it, "_attn_implementation", "")):
            raise NotImplementedError(
                f"init: layers of {name} have Cadre's attention, too, and are none of the pool's; give the model "
                f'attn_implementation={{"text_config": "cadre", "{name}": "sdpa"}}'
            )
    return next((it for it in model.modules() if getattr(it, "config", None) is text), model)


def name_layers(model: Any) -> None:
    """Gives each attention module of a model of transformers the number of its layer, in a tensor: a number in a
    tensor costs a compiled model one compilation, not one a layer. Modules that are used twice have none."""
    model = reads_text(inside(model))
    if hasattr(getattr(model, "config", None), "num_hidden_layers"):
        for at, it in enumerate(_attention_modules(model, _with_attention(model))):
            it.cadre_layer = torch.tensor(at, device="cpu")


class Stretch(NamedTuple):
    """Consecutive rows of a document that this rank holds. A document may go on in another rank, under the same
    number."""

    document: int
    """Number of the document: the same on every rank that holds some of it, no other's in this step."""
    rows: int
    """Rows of the whole document."""
    start: int
    end: int


# Rows of parts of documents that were packed or announced last. By their numbers: a loader, a collator or a move to a
# GPU makes another tensor of the ends.
_PARTS: dict[tuple[int, ...], None] = {}
_REMEMBERED = 4096


def remember_parts(layout: Sequence[Stretch]) -> None:
    """Remembers a layout in which documents go on in other ranks: as whole ones, its rows would lack keys."""
    if any(it.end - it.start < it.rows for it in layout):
        rows = tuple(it.end - it.start for it in layout)
        # The newest is last.
        _PARTS.pop(rows, None)
        _PARTS[rows] = None
        if len(_PARTS) > _REMEMBERED:
            _PARTS.pop(next(iter(_PARTS)), None)


def are_parts(lengths: Sequence[int]) -> bool:
    """Whether a remembered layout has these rows."""
    return bool(_PARTS) and tuple(lengths) in _PARTS


Layout: TypeAlias = Sequence[int] | Sequence[Stretch]
"""Rows of this rank in order: lengths of documents that lie whole on it, or stretches."""


def is_layout(it: Any) -> bool:
    """Whether it is a layout, and not a length or a stretch of one; also a tensor or array of lengths."""
    return not isinstance(it, Stretch) and (isinstance(it, Sequence) or getattr(it, "ndim", 0) > 0)


def stretches_of(layout: Layout, rank: int, ranks: int) -> list[Stretch]:
    """A layout of a rank as stretches. Documents that are whole there get numbers that no other rank uses."""
    rows: list[Any] = list(layout)
    try:
        whole = [
            it if isinstance(it, Stretch) else Stretch(rank + at * ranks, index(it), 0, index(it))
            for at, it in enumerate(rows)
        ]
    except TypeError:
        raise ValueError(f"rank {rank}: layout {layout}; give whole numbers, or stretches") from None
    if len({isinstance(it, Stretch) for it in layout}) > 1:
        raise ValueError(f"rank {rank}: a layout has lengths and stretches; write stretches alone")
    if any(not 0 <= it.start < it.end <= it.rows for it in whole):
        raise ValueError(f"rank {rank}: layout {list(layout)}; give documents of 1 row or more")
    if large := [it for it in whole if not 0 <= it.document < 1 << 32 or it.rows >= 1 << 32]:
        raise ValueError(f"rank {rank}: {large[0]}; numbers and rows of documents are below 2^32, and not negative")
    remember_parts(whole)
    return whole


def check_ends(**ends: torch.Tensor | None) -> None:
    """Ends of documents are read when a call is made: where they lie on a GPU it waits for that."""
    for name, it in ends.items():
        if it is None or (type(it) is torch.Tensor and it.is_cpu):
            continue
        if not isinstance(it, torch.Tensor):
            raise TypeError(f"{name} is a {type(it).__name__}; give a tensor of integers, as FlashAttention's")
        if it.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} is on {it.device}; give it on the CPU")


def refuse_documents(**ends: torch.Tensor | None) -> None:
    """Refuses ends of documents where there are no rows."""
    for name, it in ends.items():
        if it is not None and (told := it.tolist()) not in ([], [0]):
            raise ValueError(f"{name} is {told}, and q, k and v have no rows; give [0], or the rows of these documents")


def differences(name: str, ends: torch.Tensor) -> list[int]:
    """Lengths of documents from their ends."""
    if ends.dim() != 1 or ends.is_floating_point() or ends.dtype == torch.bool:
        raise ValueError(f"{name} is {tuple(ends.shape)} of {ends.dtype}; give integers in one dimension")
    told = ends.tolist()
    lengths = [end - start for start, end in itertools.pairwise(told)]
    if not lengths or told[0] != 0 or min(lengths) < 1:
        repeats = lengths and told[0] == 0 and min(lengths) == 0
        remedy = "; take documents of 0 rows out, as torch.unique_consecutive does" if repeats else ""
        raise ValueError(f"{name} is {told}; it begins with 0 and each number is higher than the one before{remedy}")
    return lengths


def refuse_rows(lengths: Sequence[int], q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuses what a call's tensors have by the names of its arguments, where the native half has refused it."""
    if sum(lengths) != len(q) == len(k):
        raise ValueError(
            f"cu_seqlens_q ends at {sum(lengths)} and q has {len(q)} rows; give the rows of these documents alone: "
            "rows behind the last one (padding) are not there"
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; give q a multiple of k's heads, 1 or more")


def lengths_of(batch: Any) -> Layout:
    """Lengths of a packed batch, from its `cu_seq_lens_q` (transformers' collator) or `cu_seqlens`; of one that has
    no position ids, its rows. What `pack` has made says it itself."""
    if isinstance(layout := getattr(batch, "layout", None), list):
        return layout
    told = batch if isinstance(batch, Mapping) else {}
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if told.get(name) is not None:
            ends = told[name] if isinstance(told[name], torch.Tensor) else torch.as_tensor(told[name], device="cpu")
            return [] if ends.tolist() == [0] else differences(f"batches: {name}", ends)
    ids = told.get("input_ids")
    if isinstance(ids, torch.Tensor) and ids.dim() == 2 and told.get("position_ids") is None:
        return [ids.shape[1]] * ids.shape[0] if ids.numel() else []
    raise TypeError("batches: a batch has no cu_seq_lens_q and no cu_seqlens; give `layout`, which says its documents")
