"""Whose documents a call that this process computes has: those that it names, or those of the step.

In: ends of documents, the step that runs. Out: lengths, and the ticket from which a backward knows them again; or a
refusal that names the remedy.
"""

from torch import Tensor

from . import _job, _layout, _local
from ._step import Step

LOCAL_TICKET = -1
"""Of what named its documents. One that took those of micro-batch `key` has `LOCAL_TICKET - 1 - key`."""


def lengths_of(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> list[int] | None:
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is there and cu_seqlens_q is not; pass both")
        return None
    lengths = _layout.differences("cu_seqlens_q", cu_seqlens_q)
    same = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q or cu_seqlens_q.tolist() == cu_seqlens_k.tolist()
    if not same:
        raise NotImplementedError("cu_seqlens_q and cu_seqlens_k differ: queries and keys are of the same rows here")
    return lengths


def whole(lengths: list[int] | None, rows: int) -> tuple[list[int], int]:
    """Lengths and ticket for a forward of so many rows that this process computes."""
    step, ticket, beside = _job.running(), LOCAL_TICKET, _local.under_local()
    if lengths is None:
        if beside:
            # A call of an evaluation: its rows are not those of the step.
            raise ValueError(
                "under cadre.local() the documents are not the step's: pass cu_seqlens (cu_seq_lens_q of transformers)"
            )
        if step is None:
            raise ValueError("outside of a step documents have no known ends: pass cu_seqlens (cu_seq_lens_q)")
        step.refuse_unknown_recompute()
        step.refuse_further()
        lengths, ticket = step.lengths(), LOCAL_TICKET - 1 - step.key()
        if sum(lengths) != rows:
            raise ValueError(
                f"{step.where()}: its documents have {sum(lengths)} rows and q {rows}; give the batch's rows, or "
                "evaluate under cadre.local()"
            )
    if _layout.are_parts(lengths) and not _local.says_whole():
        where = f"step {step.number}: " if step else ""
        raise ValueError(
            f"{where}a document of {lengths} rows goes on in another rank, and its keys are not here; leave "
            "cadre.local() out (`cadre run --attention local` does without a pool), or say cadre.local(whole=True) "
            "where these are others, which lie whole on this rank"
        )
    return lengths, ticket


def same_as_forward(ticket: int, ends: Tensor | list[int] | None) -> list[int]:
    """Lengths for the backward of a forward that this process computed, even if another step runs by now. `ends` may be
    the lengths that it said."""
    if ticket == LOCAL_TICKET:
        return ends if isinstance(ends, list) else lengths_of(ends, None)
    (step, at), now = Step.of_key(LOCAL_TICKET - 1 - ticket), _job.running()
    if now is None or now.number != step:
        said = f"step {now.number} runs" if now else "no step runs"
        raise RuntimeError(
            f"backward of step {step} while {said}; call backward before the next step, or pass cu_seqlens"
        )
    return now.lengths(at)
