"""The operators of `torch.library`, and FlashAttention's face before them.

In: rows of Q, K and V. Out: O and LSE, differentiable both. An operator decides at run time who computes, so that a
compiled model is the same in and out of a job: the pool inside a step, this process elsewhere.

A forward returns a ticket, a number in a tensor, which its backward hands in again: on the pool the number of the phase
in all steps; -1 for what was computed here, -2 - micro-batch where its documents were that micro-batch's. Nothing that
is not supported is ignored: it is refused by its name.
"""

import threading
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import _documents, _frozen, _here, _job, _kept, _kind, _layout, _mistakes, _place
from ._documents import LOCAL_TICKET
from ._native import RefusedError

# Per thread: whether autograd may call the current forward again in a backward (checkpointing).
_next = threading.local()

_library = torch.library.Library("cadre", "DEF")
# A session's calls are no work that a CUDA graph could hold.
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, str kind, Tensor? layer)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(
    "attention_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor ticket,"
    " Tensor? cu_seqlens, str kind) -> (Tensor, Tensor, Tensor)",
    tags=_tags,
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    kind: str,
    layer: Tensor | None,
) -> tuple[Tensor, Tensor, int, list[int] | None]:
    """O, LSE, ticket, and lengths that the call said: the backward need not read them again."""
    pool = _job.pooled()
    if not (q.shape[0] or k.shape[0] or v.shape[0]) and (pool is None or pool[1].may_be_empty()):
        # The rank has no documents of the micro-batch, and its model is called all the same.
        _layout.refuse_documents(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        return _place.room(q.shape, q), _place.room(q.shape[:2], q, torch.float32), LOCAL_TICKET, None
    lengths = told = _documents.lengths_of(cu_seqlens_q, cu_seqlens_k)
    if pool:
        job, step = pool
        if job.refuses_wider:
            _place.refuse_wider(step.where(), q, job.wire)
        named = None if layer is None else int(layer)
        with job.turn:
            phase, kept = step.forward_phase(kind, lengths, [tuple(it.shape) for it in (q, k, v)], named)
            at, layer_at = phase
            number = step.ticket(at, layer_at)
            if kept:
                o, lse = kept.again((q, k, v), f"{step.where(at)}, layer {layer_at}", is_named=named is not None)
                return o, lse, number, told
            if (lent := _place.lent(q)) and job.session.gpu is None:
                _place.say_in_place(q, job.wire)
            ticket = job.session.submit(phase, tuple(_place.rows(it) for it in (q, k, v)), lent=lent)
            step.forward[at] += 1
        o, lse = _place.room(q.shape, q), _place.room(q.shape[:2], q, torch.float32)
        job.not_finite.found(step.number, job.session.wait(ticket, o, lse, lent=lent))
        if getattr(_next, "is_repeated", True):
            step.kept[phase] = _kept.Kept((q, k, v), o, lse)
        return o, lse, number, told
    if (job := _job.before_steps()) and (q.requires_grad or k.requires_grad or v.requires_grad):
        name = next(name for name, it in (("q", q), ("k", k), ("v", v)) if it.requires_grad)
        raise RuntimeError(
            f"rank {job.rank}: no step has begun, and {name} has a gradient; call cadre.begin_step, or take batches of "
            "cadre.batches, or compute it under cadre.local()"
        )
    if check := _job.check():
        check.takes(kind, lengths, (q, k, v), layer)
    if check and (step := check.spanning(lengths)):
        number, layout = LOCAL_TICKET - 1 - step.key(), step.layouts[step.at]
        o, lse = check.exchange.whole(layout, (q, k, v), lambda lengths, rows: _here.forward(kind, lengths, *rows))
        check.saw(o)
        return o, lse, number, told
    lengths, number = _documents.whole(lengths, q.shape[0])
    taken = _job.running() if number < LOCAL_TICKET else None
    if check and check.plain:
        lengths, number = check.announced(lengths, number)
        o, lse = check.attention(kind, lengths, (q, k, v))
    else:
        try:
            o, lse = _here.forward(kind, lengths, q, k, v)
        except RefusedError:
            _layout.refuse_rows(lengths, q, k)
            raise
        if check:
            check.saw(o)
    if taken:
        taken.count_further()
    return o, lse, number, told


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    ticket: Tensor | int,
    ends: Tensor | list[int] | None,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.shape[0]:
        return tuple(_place.room(it.shape, it) for it in (q, k, v))
    if dout.is_neg():
        dout = dout.resolve_neg()
    if dlse is not None:
        dlse = _place.dense(dlse)
    if (number := int(ticket)) >= 0:
        job = _job.current()
        job.check_process()
        gradients = (_place.rows(o), lse.contiguous(), _place.rows(dout), dlse)
        with job.turn:
            step, at, layer = job.backward_phase(number)
            lent = _place.lent(q)
            handle = job.session.submit((at, layer), tuple(_place.rows(it) for it in (q, k, v)), gradients, lent=lent)
            step.backward[at] += 1
            step.kept.pop((at, layer), None)
        results = tuple(_place.room(it.shape, it) for it in (q, k, v))
        job.not_finite.found(step.number, job.session.wait(handle, *results, lent=lent))
        return results
    given, step = (q, k, v, o, lse, dout, dlse), _job.running()
    if step and step.spans and number < LOCAL_TICKET:
        given = (*given[:-1], torch.zeros_like(lse) if dlse is None else dlse)
        layout = step.layouts[step.of_key(LOCAL_TICKET - 1 - number)[1]]
        here = _job.check().exchange.whole
        return here(layout, given, lambda lengths, rows: _here.backward(kind, lengths, *rows))
    lengths = _documents.same_as_forward(number, ends)
    if (check := _job.check()) and check.plain:
        return check.gradients(kind, lengths, (q, k, v), dout, torch.zeros_like(lse) if dlse is None else dlse)
    return _here.backward(kind, lengths, *given)


@_mistakes.names_rank
def _operator(*arguments: Tensor | str | None) -> tuple[Tensor, Tensor, Tensor]:
    o, lse, number, _ = _forward(*arguments)
    return o, lse, torch.tensor(number, device="cpu")


for _key in ("CPU", "CUDA"):
    _library.impl("attention", _operator, _key)
    _library.impl("attention_backward", _mistakes.names_rank(_backward), _key)


@torch.library.register_fake("cadre::attention", lib=_library)
def _fake_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, kind, layer):  # noqa: ARG001
    ticket = torch.empty((), dtype=torch.int64, device="cpu")
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32), ticket


@torch.library.register_fake("cadre::attention_backward", lib=_library)
def _fake_backward(dout, dlse, q, k, v, o, lse, ticket, cu_seqlens, kind):  # noqa: ARG001
    return tuple(it.new_empty(it.shape) for it in (q, k, v))


def _setup(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, _, ctx.kind, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _gradients(ctx, dout, dlse, _):
    q, k, v, o, lse, ticket, cu_seqlens = ctx.saved_tensors
    arguments = (dout, dlse, q, k, v, o, lse, ticket, cu_seqlens, ctx.kind)
    return (*torch.ops.cadre.attention_backward(*arguments), None, None, None, None)


torch.library.register_autograd("cadre::attention", _gradients, setup_context=_setup, lib=_library)


@_mistakes.names_rank
def refuse_second_derivative(*_) -> None:
    raise NotImplementedError(
        "cadre::attention_backward has no gradient: a second derivative of attention is not there; "
        "leave create_graph out, or detach what comes from attention"
    )


# Without it the second derivative would be zero, silently.
torch.library.register_autograd("cadre::attention_backward", refuse_second_derivative, lib=_library)


def _is_batched(it: Tensor | None) -> bool:
    return it is not None and torch._C._functorch.is_legacy_batchedtensor(it)


def refuse_batched(dout: Tensor | None, dlse: Tensor | None) -> None:
    """Refuses several gradients at once."""
    if _is_batched(dout) or _is_batched(dlse):
        raise NotImplementedError(
            "is_grads_batched (jacobian with vectorize=True): attention takes one gradient at a time; call "
            "torch.autograd.grad once for each"
        )


class _Direct(torch.autograd.Function):
    """The operators without torch's dispatcher, which would take longer than their own work."""

    @staticmethod
    def forward(ctx, q, k, v, call, with_lse):
        o, lse, ctx.ticket, ctx.lengths = _forward(q, k, v, *call)
        _, _, ctx.kind, _ = call
        ctx.save_for_backward(q, k, v, o, lse)
        if not with_lse:
            return o
        # Zeros for the gradient of LSE would cost more than all that is done here.
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @_mistakes.names_rank
    def backward(ctx, dout, dlse=None):
        refuse_batched(dout, dlse)
        q, k, v, o, lse = ctx.saved_tensors
        dout = torch.zeros_like(o) if dout is None else dout
        call, ticket, ends = _backward, ctx.ticket, ctx.lengths
        if torch.is_grad_enabled():
            # The operator refuses to be differentiated again. The caller's tensor may have other ends by now.
            call = torch.ops.cadre.attention_backward
            ends = None if ends is None else torch.tensor([0, *accumulate(ends)], device="cpu")
            ticket = torch.tensor(ticket, device="cpu")
            dlse = torch.zeros_like(lse) if dlse is None else dlse
        return *call(dout, dlse, q, k, v, o, lse, ticket, ends, ctx.kind), None, None


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody looks on who would have to see an operator: a mode, such as that of selective checkpoints, a
    class of tensors."""
    watched = torch._C._len_torch_dispatch_stack()
    return not watched and type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN


def refuse_transforms() -> bool:
    """Refuses what transforms of functions would ask of a call. `vmap` alone makes one call after the other. Whether
    there are some."""
    if not (transforms := torch._C._functorch.get_interpreter_stack()):
        return False
    kinds = {it.key() for it in transforms}
    if torch._C._functorch.TransformType.Grad in kinds:
        raise NotImplementedError(
            "torch.func: attention has no gradient in reverse mode (grad, vjp, jacrev, hessian); use "
            "torch.autograd.grad or backward"
        )
    if torch._C._functorch.TransformType.Vmap in kinds and _job.pooled():
        raise NotImplementedError(
            "torch.vmap makes several calls of one, and a call is one phase of a step; pack the rows, or evaluate "
            "under cadre.local()"
        )
    return True


def _eager(
    q: Tensor, k: Tensor, v: Tensor, call: tuple[Tensor | str | None, ...], *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    transforms = refuse_transforms()
    _next.is_repeated = _kept.is_repeated()
    try:
        if transforms or not _is_plain(q, k, v):
            return torch.ops.cadre.attention(q, k, v, *call)[:2]
        if q.is_neg() or k.is_neg() or v.is_neg():
            # Imaginary parts of conjugates are only marked as negative: memory has the other sign.
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        results = _Direct.apply(q, k, v, call, with_lse)
        return results if with_lse else (results, None)
    finally:
        # A compiled call does not say it.
        _next.is_repeated = True


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *,
    mask: str,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layer: Tensor | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """O and LSE, `[rows, heads, dim]` and `[rows, heads]`; without `cu_seqlens` the documents are the step's. An LSE
    that nobody asks for (`with_lse`) costs autograd time, and may be None."""
    q, k, v = _place.checked(q, k, v)
    _layout.check_ends(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if (watched := _frozen.watched()) is not None:
        watched.append(q.requires_grad or k.requires_grad or v.requires_grad)
    if layer is not None and not isinstance(layer, Tensor):
        raise TypeError(f"layer is {layer!r}; give its number in a tensor: torch.tensor({layer!r})")
    kind = _kind.kind_of(q.shape[-1], mask, chunk, scale, softcap or None)
    call = (cu_seqlens_q, cu_seqlens_k, kind, layer)
    if torch.compiler.is_compiling():
        o, lse, _ = torch.ops.cadre.attention(q, k, v, *call)
    else:
        o, lse = _eager(q, k, v, call, with_lse=with_lse or sinks is not None)
    if sinks is None:
        return o, lse
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks are a {type(sinks).__name__}; give a tensor with a number for each of q's heads")
    if sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks are {tuple(sinks.shape)} and q has {q.shape[1]} heads; give a number a head")
    # A sink is one more key of every row, whose value is zero. The pool knows nothing of it.
    sinks = sinks.float()
    return (o.float() * torch.sigmoid(lse - sinks)[..., None]).to(o.dtype), torch.logaddexp(lse, sinks)


@_mistakes.names_rank
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    chunk: int | None = None,
    layer: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """FlashAttention 2's function, in its order of arguments. `max_seqlen_q` and `max_seqlen_k` are not needed;
    every result is deterministic. With `return_attn_probs`: O, LSE as `[heads, rows]`, and None in place of
    probabilities. `sinks`: a learnt number a query head, one more key of every row whose value is zero; LSE counts it.
    FlashAttention 3 calls it `s_aux`, FlashAttention 4 `learnable_sink`: by these names transformers looks for it.
    `chunk`: rows after which a document is cut. `layer`: the number of the layer in a tensor, for activation
    checkpointing of several layers at once."""
    del max_seqlen_q, max_seqlen_k, deterministic
    if dropout_p or alibi_slopes is not None or block_table is not None:
        _layout.refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    if s_aux is not None or learnable_sink is not None:
        sinks = _layout.one_of(sinks=sinks, s_aux=s_aux, learnable_sink=learnable_sink)
    how: dict[str, Any] = {"mask": _kind.mask_of(causal, window_size), "chunk": chunk, "scale": softmax_scale}
    how |= {"softcap": softcap, "sinks": sinks, "layer": layer, "with_lse": return_attn_probs}
    o, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, **how)
    return (o, lse.transpose(0, 1), None) if return_attn_probs else o
