"""Where rows lie: in memory of the host, or of a GPU, behind torch's stream; and attention that a GPU computes itself.

In: tensors. Out: the GPU and stream that the native half takes, room for results beside the inputs, O, LSE and
gradients by the kernels of GPUs, or rows on the host for what these do not take. What is a GPU's, and which tensors are
refused, is decided here alone.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native
from ._layout import refuse_widths

_TYPES = (torch.float32, torch.bfloat16)
# Those of the kernels of GPUs.
_HEAD_DIMS = (64, 128, 256)

Behind = tuple[int, int]
"""Number of a GPU, and torch's current stream there."""


def lent(tensor: Tensor) -> Behind | None:
    """Behind what a session copies rows that lie beside `tensor`; None on the host."""
    if not tensor.is_cuda:
        return None
    return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


def rows(tensor: Tensor) -> Tensor:
    """Its rows as a session reads them, `[rows, heads, dim]`: the elements of a row side by side."""
    if tensor.is_neg():
        # Only marked as negative, as imaginary parts of conjugates are: memory has the other sign.
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor
    (row, head, element), (_, heads, dim) = tensor.stride(), tensor.shape
    return tensor if element == 1 and head == dim and row >= heads * dim else tensor.contiguous()


def dense(tensor: Tensor) -> Tensor:
    """Its numbers one behind the other, each with the sign that it has."""
    return tensor.resolve_neg().contiguous()


def room(shape: Sequence[int], beside: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """With any numbers, where `beside` is, of its type if no other is said."""
    return beside.new_empty(*shape) if dtype is None else beside.new_empty(*shape, dtype=dtype)


def on_host(call: Callable, kind: str, lengths: list[int], *given: Tensor | None) -> tuple[Tensor, ...]:
    """What `call` computes of rows of a GPU, which are copied to the host; the results are where they were."""
    results = call(kind, lengths, *(None if it is None else it.cpu() for it in given))
    return tuple(it.to(given[0].device) for it in results)


@functools.cache
def _has_kernels(number: int) -> bool:
    """Whether there are kernels for a GPU; why not is said once."""
    if why := _native.gpu_refuses(number):
        print(f"cadre: attention of tensors on GPU {number} is computed on the CPU: {why}", file=sys.stderr)
    return why is None


def kernels(q: Tensor, wire: torch.dtype) -> Behind | None:
    """Where the kernels of GPUs compute attention of these rows; None where the CPU's do."""
    behind = lent(q)
    fits = behind and wire == torch.bfloat16 and q.shape[-1] in _HEAD_DIMS
    return behind if fits and _has_kernels(behind[0]) else None


def computes_on(
    device: torch.device | str | int | None, model: object, dtype: torch.dtype | None, head_dims: Sequence[int]
) -> int | None:
    """The number of the GPU that computes in place: of the one that is said, else of the one where the model's
    parameters are, or of torch's current one if there is a `Shape` alone, if it has kernels for such rows. None: the
    CPU does."""
    if device is not None:
        try:
            said = torch.device(device)
        except (RuntimeError, TypeError):
            said = None
        if said is None or said.type not in ("cpu", "cuda"):
            raise ValueError(f"init: device is {device!r}; say 'cpu', 'cuda' or 'cuda:NUMBER'")
        return None if said.type == "cpu" else _number_of(said)
    if isinstance(model, torch.nn.Module):
        found = next((it.device for it in model.parameters() if it.is_cuda), None)
    else:
        found = torch.device("cuda") if torch.cuda.is_initialized() else None
    if found is None or dtype != torch.bfloat16 or not any(it in _HEAD_DIMS for it in head_dims):
        return None
    number = _number_of(found)
    return number if _has_kernels(number) else None


def _number_of(gpu: torch.device) -> int:
    if gpu.index is not None:
        return gpu.index
    if torch.cuda.is_initialized():
        return torch.cuda.current_device()
    # Each rank may see its own GPU alone.
    return 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))


def say_in_place(q: Tensor, wire: torch.dtype) -> None:
    """Says once why what a plan gives to this rank is not computed on the GPU that has its rows."""
    if wire != torch.bfloat16 or q.shape[-1] not in _HEAD_DIMS:
        return say_on_host(q, wire, of_job=True)
    return _say_once(
        f"what a plan gives to this rank is computed on the CPU, and its rows are on GPU {q.device.index}; call init "
        "when the model is there, or give it device="
    )


def say_on_host(q: Tensor, wire: torch.dtype, *, of_job: bool) -> None:
    """Says once a GPU and reason that no kernel of GPUs computes these rows, and what would change that."""
    if q.shape[-1] not in _HEAD_DIMS:
        why = f"its head dim is {q.shape[-1]}; give the model one that kernels of GPUs have, 64, 128 or 256"
    elif wire != torch.bfloat16:
        usual = "spec.attention.wire: Bf16" if of_job else "torch.autocast('cuda', torch.bfloat16), or such a model"
        why = f"its rows are {wire}, and kernels of GPUs take bfloat16; use {usual}"
    else:
        # Said by `_has_kernels`.
        return
    _say_once(f"attention of tensors on GPU {q.device.index} is computed on the CPU: {why}")


@functools.cache
def _say_once(what: str) -> None:
    print(f"cadre: {what}", file=sys.stderr)


def forward(behind: Behind, kind: str, lengths: list[int], *given: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE of whole documents."""
    qkv = tuple(it.to(torch.bfloat16).contiguous() for it in given)
    o, lse = room(qkv[0].shape, qkv[0]), room(qkv[0].shape[:2], qkv[0], torch.float32)
    _native.gpu_forward((kind, behind, lengths), qkv, (o, lse))
    return o.to(given[0].dtype), lse


def backward(
    behind: Behind,
    kind: str,
    lengths: list[int],
    qkv: Sequence[Tensor],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> tuple[Tensor, ...]:
    """dQ, dK and dV, from O, LSE, dO and dLSE."""
    o, lse, dout, dlse = gradients
    delta = torch.sum(dout.float() * o.float(), -1, out=room(lse.shape, lse))
    if dlse is not None:
        delta -= dlse
    *turned, narrow = (it.to(torch.bfloat16).contiguous() for it in (*qkv, dout))
    results = tuple(room(it.shape, it, torch.float32) for it in turned)
    _native.gpu_backward((kind, behind, lengths), tuple(turned), (narrow, lse.contiguous(), delta), results)
    return tuple(it.to(qkv[0].dtype) for it in results)


def checked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the types, dimensions and devices that are there, cast where autocast says so; others are refused."""
    is_usual = not torch.compiler.is_compiling() and _native.are_usual(q, k, v)
    if is_usual and not (torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0):
        return q, k, v
    for name, it in (("q", q), ("k", k), ("v", v)):
        if not isinstance(it, Tensor):
            raise TypeError(f"{name} is a {type(it).__name__}; give a tensor of [rows, heads, dim]")
        if type(it) is not Tensor and hasattr(it, "device_mesh"):
            raise NotImplementedError(
                f"{name} is a {type(it).__name__} over several ranks: tensor and context parallel are not there yet; "
                "set both to 1, so that a rank has its own rows with all their heads"
            )
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    is_dual = forward_ad._current_level >= 0
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.is_nested or tensor.layout != torch.strided:
            raise NotImplementedError(
                f"{name} is a tensor of layout {tensor.layout}{' (nested)' * tensor.is_nested}; give plain rows, one "
                "document behind the other, and cu_seqlens"
            )
        if tensor.dim() != 3:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; give [rows, heads, dim]")
        refuse_elsewhere(name, tensor, q)
        if is_dual and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: forward-mode AD is not there; use backward")
        if tensor.dtype not in _TYPES:
            raise TypeError(f"{name} is {tensor.dtype}; attention takes torch.float32 or torch.bfloat16: cast the rows")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and q {q.dtype}; cast them, so that all three have one type")
    refuse_widths(q=q.shape[2], k=k.shape[2], v=v.shape[2])
    return q, k, v


def refuse_wider(where: str, q: Tensor, wire: torch.dtype) -> None:
    """Refuses rows that would lose bits to a type on the wire that nobody asked for."""
    if q.dtype != wire:
        raise ValueError(
            f"{where}: q is {q.dtype} and would lose bits as {wire}, as the job was joined; give init dtype={q.dtype}, "
            "or set spec.attention.wire"
        )


def refuse_elsewhere(name: str, tensor: Tensor, beside: Tensor) -> None:
    """Refuses other devices than the CPU and GPUs, and rows on two of them."""
    if not (tensor.is_cpu or tensor.is_cuda):
        raise NotImplementedError(f"{name} is on {tensor.device}; rows lie on the CPU or on a GPU of NVIDIA's (cuda)")
    if tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {beside.device}; give all three on one device")
