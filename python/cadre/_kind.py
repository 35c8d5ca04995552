"""The kind of a layer's core attention: its mask, its chunks, and how scores are scaled and bounded.

In: arguments of FlashAttention, kinds as scripts write them. Out: a kind as text, the same for a call and for its
layer; or a refusal that names argument and remedy. It knows no tensor and no step.

Invariant: the bounds are those of the servers, so that a job refuses nothing that was taken here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch

from ._mistakes import names_rank

# Of the scores' factor and bound.
_LEAST, _MOST = 2.0**-20, 2.0**20
_DIM_STEP, _MOST_DIM = 8, 256
_MOST_HEADS = _MOST_LAYERS = (1 << 16) - 1
_MOST_ROWS = 1 << 32
_ROWS, _NUMBER = "[1-9][0-9]*", "[-+.e0-9]+"
_MASK = f"causal|full|window:{_ROWS}"
# As `kind_of` writes it, or a causal mask in chunks as `chunk:ROWS`.
_TEXT = re.compile(
    rf"(?:chunk:({_ROWS})|({_MASK})(?: in chunks of ({_ROWS}))?)(?: scale ({_NUMBER}))?(?: softcap ({_NUMBER}))?"
)


@dataclass(frozen=True)
class Kind:
    """Kind of a layer's core attention. Sinks are not part of it: the model applies them."""

    mask: str = "causal"
    """`causal`, `full` or `window:ROWS`: a row's own key and the ROWS - 1 before it."""
    chunk: int | None = None
    """Rows of a chunk, 1 or more: attention does not cross from one to the next."""
    scale: float | None = None
    """Factor of the scores, from 2^-20 to 2^20; `None` is head_dim ** -0.5."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); from 2^-20 to 2^20, or 0 for none."""
    heads: tuple[int, int] | None = None
    """Query heads and KV heads, where the layer has others than the model."""
    head_dim: int | None = None
    """Likewise."""

    @names_rank
    def __post_init__(self) -> None:
        if not re.fullmatch(_MASK, str(self.mask)) or int(self.mask.partition(":")[2] or 1) > _MOST_ROWS:
            raise ValueError(
                f"Kind: mask is {self.mask!r}; say 'causal', 'full' or 'window:ROWS' of 1 row or more, and chunk= for "
                "chunks"
            )
        if self.chunk is not None:
            _check_chunk("Kind: chunk", self.chunk)
        if self.scale is not None:
            _factor("Kind: scale", self.scale)
        if self.softcap:
            _factor("Kind: softcap", self.softcap)
        if self.heads is not None and len(self.heads) != 2:
            raise ValueError(f"Kind: heads is {self.heads}; give query heads and KV heads")

    @classmethod
    def of(cls, text: str) -> "Kind":
        """A mask alone, `chunk:ROWS`, which is causal in chunks, or what `kind_of` writes."""
        if (found := _TEXT.fullmatch(text)) is None:
            raise ValueError(
                f"{text!r} is no kind; write 'causal', 'full', 'window:ROWS' or 'chunk:ROWS', or give a cadre.Kind"
            )
        causal, mask, chunk, *both = found.groups()
        scale, softcap = (None if it is None else float(it) for it in both)
        rows = causal or chunk
        return cls(mask or "causal", None if rows is None else int(rows), scale, softcap)


def kinds_of(where: str, kinds: Sequence[str | Kind]) -> list[Kind]:
    """The kind of each layer."""
    if isinstance(kinds, str):
        raise TypeError(f"{where}: kinds is {kinds!r}; give one for each layer, such as ({kinds!r},) * 32")
    if not 0 < len(kinds) <= _MOST_LAYERS:
        raise ValueError(f"{where}: {len(kinds)} layers have kinds; a job has 1 to {_MOST_LAYERS} with core attention")
    told = []
    for layer, it in enumerate(kinds):
        if not isinstance(it, (str, Kind)):
            raise TypeError(f"{where}: layer {layer}: its kind is a {type(it).__name__}; give a mask or a cadre.Kind")
        try:
            told.append(Kind.of(it) if isinstance(it, str) else it)
        except ValueError as error:
            raise ValueError(f"{where}: layer {layer}: {error}") from None
    return told


def check_heads(where: str, query: int, kv: int, dim: int) -> None:
    """Refuses heads that no server computes."""
    for name, it in (("query_heads", query), ("kv_heads", kv), ("head_dim", dim)):
        try:
            is_number = 1 <= index(it) <= _MOST_HEADS
        except TypeError:
            is_number = False
        if not is_number:
            raise ValueError(f"{where}: {name} is {it}; give a whole number from 1 to {_MOST_HEADS}")
    if query % kv:
        raise ValueError(f"{where}: query_heads is {query} and kv_heads {kv}; give each KV head as many query heads")
    _check_dim(f"{where}: head_dim", dim)


def _check_dim(name: str, dim: int) -> None:
    if dim % _DIM_STEP or not 0 < dim <= _MOST_DIM:
        raise ValueError(
            f"{name} is {dim}; heads have a multiple of {_DIM_STEP} up to {_MOST_DIM}: pad q, k and v with zeros, "
            "and give the scale of yours"
        )


def _check_chunk(name: str, rows: int) -> None:
    if not hasattr(rows, "__index__") or not 1 <= rows < _MOST_ROWS:
        raise ValueError(f"{name} is {rows}; give a whole number of rows, 1 or more")


def _factor(name: str, number: float) -> float:
    """A number by which scores are multiplied or bounded."""
    if isinstance(number, str) or not _LEAST <= number <= _MOST:
        raise ValueError(f"{name} is {number!r}; give a number from 2^-20 to 2^20")
    return number


def _of_call(number: float | None) -> float | None:
    """The number itself. A compiler that has seen two of them asks for any, and a kind is that of one."""
    if number is None or not torch.compiler.is_compiling():
        return number
    # Of a compiler that is loaded already.
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def kind_of(head_dim: int, mask: str, chunk: int | None, scale: float | None, softcap: float | None) -> str:
    """A kind as text, of as many digits as f32 has. The usual scale is left out, so that it is computed where the
    servers compute it, to its last bit. What no server computes is refused by FlashAttention's names."""
    if head_dim % _DIM_STEP or not 0 < head_dim <= _MOST_DIM:
        _check_dim("head dim of q", head_dim)
    told, usual, scale, softcap = mask, head_dim**-0.5, _of_call(scale), _of_call(softcap)
    if chunk is not None:
        _check_chunk("chunk", chunk)
        told += f" in chunks of {chunk}"
    if scale is not None and scale != usual and not abs(_factor("softmax_scale", scale) - usual) <= 1e-6 * usual:
        told += f" scale {scale:.9g}"
    if softcap:
        told += f" softcap {_factor('softcap', softcap):.9g}"
    return told


def same_on(longest: int, *kinds: str) -> bool:
    """Whether kinds keep the same keys of documents of at most so many rows: a window that is no shorter is causal. By
    a kernel's name transformers leaves such windows out."""
    told = set()
    for it in kinds:
        mask, _, more = it.partition(" ")
        rows = mask.removeprefix("window:")
        told.add(("causal" if rows != mask and int(rows) >= longest else mask, more))
    return len(told) == 1


def mask_of(causal: bool, window_size: tuple[int, int]) -> str:
    """The mask that FlashAttention's arguments describe."""
    if causal is True and window_size == (-1, -1):
        return "causal"
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(hasattr(it, "__index__") for it in sides):
        raise TypeError(f"window_size is {window_size}; give the rows to the left and to the right, or -1 for all")
    left, right = window_size
    if not -1 <= left < _MOST_ROWS or right < -1:
        raise ValueError(f"window_size {(left, right)}: a side has 0 rows or more, below 2^32, or -1 for all")
    if causal or right == 0:
        # As FlashAttention has it: a causal row sees no later key, whatever is to the right.
        return f"window:{left + 1}" if left >= 0 else "causal"
    if (left, right) != (-1, -1):
        raise NotImplementedError(
            f"window_size {(left, right)} with causal=False: rows see no later key here, or all rows of their document"
        )
    return "full"
