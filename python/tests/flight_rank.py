"""A rank of the tests' job whose micro-batches are in flight together; then one of two ranks meets a number that is not
finite.

In: the environment of a job; `--on-nonfinite`, for `init`. Out: an exception where micro-batches in flight have other
bits than those that run one after the other, where a call out of turn is not refused, or where other documents feel
what is not finite.
"""

import argparse
import os

import cadre
import torch
from cadre._turns import order_of
from refusals import mistaken
from torch.utils.checkpoint import checkpoint

HEADS, KV_HEADS, DIM, LAYERS = 2, 1, 8, 3
# By micro-batch and rank.
LAYOUTS = [[[60, 9], [30]], [[24], [24, 1]], [[24], [24, 17]], [[81], [13, 40]]]


def all_forward_first(count: int) -> str:
    return " ".join(f"{way}{at}" for way in "FB" for at in range(count))


# The turns of each step, and whether layers are computed again in the backward.
MIXED = "F0 F1 B0 F2 F3 B2 B1 B3"
STEPS = [(None, False), (MIXED, False), (2, True), (2, False), (all_forward_first, True)]


def rows_of(rank: int, at: int) -> list[list[torch.Tensor]]:
    seed = torch.Generator().manual_seed(100 * rank + at)
    count = sum(LAYOUTS[at][rank])
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [[torch.randn(count, it, DIM, generator=seed).requires_grad_() for it in heads] for _ in range(LAYERS)]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return cadre.flash_attn_varlen_func(q, k, v, None, None, 0, 0, causal=True)


def forward(leaves: list[list[torch.Tensor]], *, again: bool) -> torch.Tensor:
    o = 0.0
    for q, k, v in leaves:
        o = checkpoint(attend, q + o, k, v, use_reentrant=False) if again else attend(q + o, k, v)
    return o


def results(rank: int, turns, *, again: bool) -> list[torch.Tensor]:
    """O and all gradients of the four micro-batches."""
    leaves = [rows_of(rank, it) for it in range(4)]
    found: list[torch.Tensor] = [torch.empty(0)] * 4
    for way, (at,) in order_of(turns, 4):
        if way == "F":
            if at:
                cadre.next_micro_batch()
            found[at] = forward(leaves[at], again=again)
            if turns is None and at < 3:
                mistaken("3 of 3 forward phases and 0 of 3 backward phases were called", cadre.next_micro_batch)
            continue
        if turns == MIXED and at == 2:
            early = (found[1].sum(), leaves[1][2][0])
            words = f"layer 2, and the turn of B2 comes before (the turns of the step are {MIXED})"
            mistaken(words, lambda early=early: torch.autograd.grad(*early, retain_graph=True))
            mistaken("it is the last micro-batch", cadre.next_micro_batch)
        found[at].square().sum().backward()
    return [it.detach() for it in found] + [it.grad for one in leaves for layer in one for it in layer]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on-nonfinite", default="report")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    shape = cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS)
    cadre.init(shape, steps=len(STEPS) + 1, on_nonfinite=options.on_nonfinite)
    layouts, first = [it[rank] for it in LAYOUTS], None
    for number, (turns, again) in enumerate(STEPS):
        # One of them is announced ahead, with its turns.
        assert cadre.begin_step(layouts, next=layouts if number == 2 else None, turns=turns)
        found = results(rank, turns, again=again)
        first = first or found
        same = [torch.equal(*both) for both in zip(first, found, strict=True)]
        assert all(same), f"step {number}: {same}"
        cadre.report(loss=0.0)
    # In the second document of rank 1, in the values of its second layer.
    assert cadre.begin_step(layouts[3])
    leaves = rows_of(rank, 3)
    with torch.no_grad():
        leaves[1][2][20] += torch.nan if rank else 0.0
    result = forward(leaves, again=True)
    result.square().sum().backward()
    for it in (result, *(it.grad for layer in leaves for it in layer[:2])):
        assert it[: 13 if rank else None].isfinite().all(), "other documents feel it"
        assert not rank or it is leaves[2][1].grad or not it[13:].isfinite().all(), "it is hidden"
    cadre.report(loss=result.sum())
    cadre.finish()


main()
