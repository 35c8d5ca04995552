"""A rank of a model of two layers that has no documents of some micro-batches: there its model is called with no rows
in even steps, and not at all in odd ones.

In: the environment of a job; `--turns` of its steps. Out: an exception, if a result differs from that of
`cadre.local()`, where documents lie whole on the rank.
"""

import argparse
import os

import cadre
import torch
from refusals import mistaken

HEADS, KV_HEADS, DIM = 4, 2, 16
# By micro-batch and rank.
LAYOUTS = [[[40, 7], []], [[], [30]], [[25], [12, 3]], [[], [9]]]
STEPS = 3


def model(q: torch.Tensor, kv: torch.Tensor, layout: list[int], last: bool) -> torch.Tensor:
    ends = torch.tensor([0, *layout]).cumsum(0).int()
    for _ in range(2):
        q = cadre.flash_attn_varlen_func(q, kv, kv, ends, ends, 0, 0, causal=True)
    return q.square().sum() + (q.sum() if last else 0)


def results(step: int, at: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Loss, dQ and dK + dV of a micro-batch."""
    layout = LAYOUTS[at][rank]
    torch.manual_seed(step * len(LAYOUTS) + at)
    q, kv = (torch.randn(sum(layout), it, DIM).requires_grad_() for it in (HEADS, KV_HEADS))
    return model(q, kv, layout, last=at == len(LAYOUTS) - 1), q, kv


def backward(step: int, rank: int, at: int, found: tuple[torch.Tensor, ...]) -> float:
    """The loss; an exception where it or a gradient is not that of this process."""
    if not found:
        return 0.0
    found[0].backward()
    with cadre.local():
        expected = results(step, at, rank)
        expected[0].backward()
    same = torch.equal(found[0], expected[0]) and torch.equal(found[1].grad, expected[1].grad)
    assert same, f"step {step}, micro-batch {at}: the loss or dQ has other bits"
    # A plan may cut a document, and sums dK and dV in another order then.
    assert torch.allclose(found[2].grad, expected[2].grad, rtol=1e-5, atol=1e-5), f"step {step}, micro-batch {at}: dK"
    return float(found[0])


def run(step: int, rank: int, turns: int) -> float:
    waiting, total = [], 0.0
    for at, layouts in enumerate(LAYOUTS):
        if at:
            cadre.next_micro_batch()
        has_rows = bool(layouts[rank])
        if not has_rows:
            mistaken("announced without documents", lambda: results(step, 2, 0))
        waiting.append((at, results(step, at, rank) if has_rows or step % 2 == 0 else ()))
        if len(waiting) == turns:
            total += backward(step, rank, *waiting.pop(0))
    return total + sum(backward(step, rank, *it) for it in waiting)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * 2), steps=STEPS)
    layouts = [it[rank] for it in LAYOUTS]
    for step in range(STEPS):
        assert cadre.begin_step(layouts, next=layouts, turns=options.turns)
        cadre.report(loss=run(step, rank, options.turns))
    cadre.finish()


main()
