"""A rank of the tests' job that trains two micro-batches at once: while rows of one travel the other one computes.

In: the environment of a job. Out: an exception where losses or weights have other bits than those of a training whose
calls come one after the other, or where a mistake is not refused.
"""

import os

import cadre
import torch
from refusals import mistaken
from torch import Tensor, nn
from torch.nn.functional import gelu

HEADS, KV_HEADS, DIM, LAYERS, STEPS = 4, 2, 8, 3, 3
WIDTH = HEADS * DIM
TURNS = "F0+1 B1+0"
# By rank and micro-batch.
LAYOUTS = [[[60, 9], [33]], [[24, 40], [13, 40]]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (-1, DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)

    def after(self, x: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        # LSE has a gradient, too.
        x = x + self.out(o.flatten(1)) + 0.01 * lse.sum(-1, keepdim=True)
        return x + gelu(self.mix(x))


class Training:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.rank, self.losses = rank, []

    def rows(self, at: int) -> Tensor:
        count = sum(LAYOUTS[self.rank][at])
        return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(10 * self.rank + at))

    def over(self, losses: list[Tensor]) -> None:
        self.losses += [it.item() for it in losses]
        self.optimizer.step()
        self.optimizer.zero_grad()
        cadre.report(loss=losses[0].item())

    def one_by_one(self) -> None:
        losses = []
        for at in range(2):
            if at:
                cadre.next_micro_batch()
            x = self.rows(at)
            for it in self.layers:
                rows = (*it.before(x), None, None, 0, 0)
                o, lse, _ = cadre.flash_attn_varlen_func(*rows, causal=True, return_attn_probs=True)
                x = it.after(x, o, lse.T)
            losses.append(x.square().mean())
            losses[-1].backward()
        self.over(losses)

    def together(self) -> None:
        xs, flights = [self.rows(at) for at in range(2)], [None, None]
        for number, it in enumerate(self.layers):
            for at, x in enumerate(xs):
                if number:
                    # Of the layer before; the other one's rows travel meanwhile.
                    xs[at] = x = self.layers[number - 1].after(x, *cadre.wait(flights[at]))
                rows = it.before(x)
                if not at:
                    words = f"layer {number}, and the turn of F0 comes before (the turns of the step are {TURNS})"
                    mistaken(words, lambda rows=rows: cadre.submit(*rows, micro_batch=1))
                flights[at] = cadre.submit(*rows, micro_batch=at)
        words = f"wait for layer {LAYERS - 1}, and that for micro-batch 0 comes before"
        mistaken(words, lambda: cadre.wait(flights[1]))
        losses = [self.layers[-1].after(x, *cadre.wait(it)).square().mean() for x, it in zip(xs, flights, strict=True)]
        mistaken("it was waited for; submit again", lambda: cadre.wait(flights[0]))
        sum(losses).backward()
        self.over(losses)


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=2 * STEPS)
    for_each = [Training(rank) for _ in range(2)]
    for step in range(2 * STEPS):
        turns = TURNS if step >= STEPS else None
        assert cadre.begin_step(LAYOUTS[rank], turns=turns)
        training = for_each[step >= STEPS]
        (training.together if turns else training.one_by_one)()
    # Before the job is over, whose exit code is not that of what comes after.
    one, other = for_each
    assert one.losses == other.losses, (one.losses, other.losses)
    for a, b in zip(one.layers.parameters(), other.layers.parameters(), strict=True):
        assert torch.equal(a, b)
    cadre.finish()


main()
