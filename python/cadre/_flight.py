"""Attention in two halves, with gradients: what one micro-batch has submitted travels while another one computes.

In: rows of Q, K and V, then what `submit` returned. Out: O and LSE. In a backward they are halves, too: that of `wait`
submits the gradients of O and LSE, that of `submit` waits for those of Q, K and V. Autograd goes through them in the
reverse order of the forward, so that there, too, one travels while another one computes.

Where no pool computes, `submit` computes.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import _attention, _job, _kept, _kind, _layout, _local, _mistakes, _place
from ._native import Ticket


class InFlight:
    """What `submit` returns, to be handed to `wait` once."""

    def __init__(self, results: tuple[Tensor, ...] = (), step: int = -1, number: int = -1) -> None:
        self.results = results
        """What is there without waiting."""
        self.step, self.number = step, number
        """The step, and the number of the phase in all steps."""
        self.phase = (-1, -1)
        """Micro-batch and layer."""
        self.shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        """Shape and type of Q."""
        self.out: Ticket | None = None
        """The session's ticket of the half that is out."""
        self.token: Tensor | None = None
        self.waited = False


class _Submit(torch.autograd.Function):
    """A token that stands for the phase: what `_Wait` makes of it depends on Q, K and V. They are saved here, so that
    torch sees whether they change after they were submitted."""

    @staticmethod
    def forward(ctx, flight, job, q, k, v):
        ctx.flight, ctx.job = flight, job
        ctx.save_for_backward(q, k, v)
        flight.shape, flight.dtype = q.shape, q.dtype
        rows, lent = tuple(_place.rows(it) for it in (q, k, v)), _place.lent(q)
        flight.out = job.session.submit(flight.phase, rows, lent=lent)
        return torch.zeros((), device=q.device)

    @staticmethod
    def backward(ctx, _):
        # Behind the stream of this half: each half may have one of its own.
        results = tuple(_place.room(it.shape, it) for it in ctx.saved_tensors)
        ticket, lent = ctx.flight.out, _place.lent(results[0])
        ctx.job.not_finite.found(ctx.flight.step, ctx.job.session.wait(ticket, *results, lent=lent))
        return None, None, *results


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flight, job, token):
        ctx.flight, ctx.job, ctx.device = flight, job, token.device
        o = _place.room(flight.shape, token, flight.dtype)
        lse = _place.room(flight.shape[:2], token, torch.float32)
        job.not_finite.found(flight.step, job.session.wait(flight.out, o, lse, lent=_place.lent(o)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(o, lse)
        return o, lse

    @staticmethod
    @_mistakes.names_rank
    def backward(ctx, dout, dlse):
        if torch.is_grad_enabled():
            _attention.refuse_second_derivative()
        _attention.refuse_batched(dout, dlse)
        flight, job = ctx.flight, ctx.job
        o, lse = ctx.saved_tensors
        # Of the half before: the token is all that this one has.
        ((before, _),) = ctx.next_functions
        rows = before.saved_tensors
        dout = torch.zeros_like(o) if dout is None else dout
        gradients = (_place.rows(o), lse, _place.rows(dout), None if dlse is None else _place.dense(dlse))
        job.check_process()
        with job.turn:
            step, at, layer = job.backward_phase(flight.number)
            given = tuple(_place.rows(it) for it in rows)
            flight.out = job.session.submit((at, layer), given, gradients, lent=_place.lent(o))
            step.backward[at] += 1
        return None, None, torch.zeros((), device=ctx.device)


@_mistakes.names_rank
def submit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    chunk: int | None = None,
    micro_batch: int | None = None,
) -> InFlight:
    """Begins attention on packed rows, `[rows, heads, dim]`, of a micro-batch of the step (default: the current one).
    One that is named needs no `next_micro_batch`.

    In a step whose `turns` let micro-batches go through a layer together (`F0+1 B1+0`), each is submitted before the
    first is waited for. The script calls the layers of each in their order, and one backward for all of them. Nothing
    of it is for checkpoints and compiled code.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("cadre.submit is not for compiled code; compile what lies between submit and wait")
    mask = _kind.mask_of(causal, window_size)
    pool = _job.pooled()
    if pool is None:
        here = cu_seqlens is None and micro_batch is not None and not _local.under_local()
        if here and (step := _job.running()):
            cu_seqlens = torch.tensor(list(accumulate(step.lengths(micro_batch), initial=0)), device="cpu")
        how: dict[str, Any] = {"mask": mask, "chunk": chunk, "scale": softmax_scale, "softcap": softcap}
        return InFlight(_attention.attend(q, k, v, cu_seqlens, None, **how))
    _attention.refuse_transforms()
    q, k, v = _place.checked(q, k, v)
    _layout.check_ends(cu_seqlens=cu_seqlens)
    job, step = pool
    if (_kept.is_repeated() and step.backwards) or torch._C._current_graph_task_id() != -1:
        raise NotImplementedError(
            "cadre.submit in a checkpoint, under other hooks of saved tensors (save_on_cpu), or without gradients, is "
            "not there yet; put these around what lies between wait and the next submit"
        )
    at = step.at if micro_batch is None else micro_batch
    if not 0 <= at < len(step.layouts):
        raise ValueError(f"{step.where(0)}: micro_batch is {at}, and the step has {len(step.layouts)}")
    if not len(q) and not step.layouts[at]:
        # Without rows, and in the graph all the same: weights get gradients of zero on every rank.
        o = q + 0 * (k.sum() + v.sum())
        return InFlight((o, o.float().sum(-1)))
    lengths = None if cu_seqlens is None else _layout.differences("cu_seqlens", cu_seqlens)
    kind = _kind.kind_of(q.shape[-1], mask, chunk, softmax_scale, softcap or None)
    with job.turn:
        if job.refuses_wider:
            _place.refuse_wider(step.where(at), q, job.wire)
        phase, _ = step.forward_phase(kind, lengths, [tuple(it.shape) for it in (q, k, v)], None, at)
        flight = InFlight(step=step.number, number=step.ticket(*phase))
        flight.phase = phase
        flight.token = _Submit.apply(flight, job, q, k, v)
        step.forward[at] += 1
        step.flights.add(phase)
    return flight


@_mistakes.names_rank
def wait(flight: InFlight) -> tuple[Tensor, Tensor]:
    """O and LSE, `[rows, heads, dim]` and `[rows, heads]`, differentiable both."""
    if not isinstance(flight, InFlight):
        raise TypeError(f"wait: {type(flight).__name__} is not what cadre.submit returned")
    if flight.waited:
        raise ValueError("wait: it was waited for; submit again")
    if flight.token is None:
        flight.waited = True
        return flight.results
    job = _job.current()
    job.check_process()
    with job.turn:
        if (step := job.running) and step.number == flight.step:
            step.end_flight(*flight.phase)
    results = _Wait.apply(flight, job, flight.token)
    # Not before: who is interrupted may wait again.
    flight.waited, flight.token = True, None
    return results
