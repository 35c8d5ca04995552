"""A rank of `cadre.Session` without autograd: two micro-batches are with the pool at once.

In: the environment of a job. Out: an exception where they have other bits than those that come one after the other, or
where results that are refused cost their ticket.
"""

import os

import cadre
import torch
from refusals import refused

HEADS, KV_HEADS, DIM, LAYERS, ROWS = 2, 1, 8, 3, 40


def rows(rank: int, micro_batch: int, layer: int, *heads: int) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(100 * rank + 10 * micro_batch + layer)
    return tuple(torch.randn(ROWS, it, DIM, generator=seed) for it in heads)


class Rank:
    def __init__(self) -> None:
        heads = [(HEADS, KV_HEADS, DIM)] * LAYERS
        self.session = cadre.Session.join(kinds=["causal"] * LAYERS, heads=heads, steps=2, seed=0, threads=1)
        self.found: dict[tuple[int, int, str], tuple[torch.Tensor, ...]] = {}

    def submit(self, micro_batch: int, layer: int, way: str) -> cadre.Ticket:
        q, k, v = rows(self.session.rank, micro_batch, layer, HEADS, KV_HEADS, KV_HEADS)
        if layer:
            # What the layer before came to.
            q = q + self.found[micro_batch, layer - 1, "F"][0]
        if way == "F":
            return self.session.submit((micro_batch, layer), (q, k, v))
        o, lse = self.found[micro_batch, layer, "F"]
        (dout,) = rows(self.session.rank, micro_batch, 9, HEADS)
        return self.session.submit((micro_batch, layer), (q, k, v), (o, lse, dout, None))

    def wait(self, ticket: cadre.Ticket, micro_batch: int, layer: int, way: str) -> None:
        heads = (HEADS,) if way == "F" else (HEADS, KV_HEADS, KV_HEADS)
        results = tuple(torch.empty(ROWS, it, DIM) for it in heads)
        if way == "F":
            o, lse = results = (*results, torch.empty(ROWS, HEADS))
            # Of the form of their tensors; the ticket is not theirs yet.
            refused("LSE is torch.bfloat16; use torch.float32", lambda: self.session.wait(ticket, o, lse.bfloat16()))
            refused(
                "O shares memory with LSE",
                lambda: self.session.wait(ticket, o, o.view(-1)[: lse.numel()].view(lse.shape)),
            )
            refused("O is torch.float64", lambda: self.session.wait(ticket, o.double(), lse))
            refused("wait takes O and LSE, or dQ, dK and dV", lambda: self.session.wait(ticket, o))
        assert self.session.wait(ticket, *results) is None
        refused("this ticket was waited for; submit a phase again", lambda: self.session.wait(ticket, *results))
        self.found[micro_batch, layer, way] = results

    def step(self, number: int, turns: list[tuple[str, int | list[int]]]) -> dict:
        """All results; what is in one turn is submitted before any of it is waited for."""
        session, self.found = self.session, {}
        documents = [session.rank * 2, session.rank * 2 + 1]
        # A document, and the rest.
        layout = (
            [(documents[0], 15), (documents[1], ROWS - 15)],
            [(documents[0], 0, 15), (documents[1], 0, ROWS - 15)],
        )
        session.announce(number, [layout] * 2, turns, 0)
        assert session.begin(number) == "step"
        for way, these in turns:
            micro_batches = [these] if isinstance(these, int) else these
            for layer in range(LAYERS) if way == "F" else reversed(range(LAYERS)):
                tickets = [self.submit(it, layer, way) for it in micro_batches]
                for ticket, micro_batch in zip(tickets, micro_batches, strict=True):
                    self.wait(ticket, micro_batch, layer, way)
        more = {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0, "validation_loss": None}
        session.done(number, **more, tokens=ROWS, seconds=0.0)
        return self.found


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    alone = rank.step(0, [("F", 0), ("B", 0), ("F", 1), ("B", 1)])
    together = rank.step(1, [("F", [0, 1]), ("B", [0, 1])])
    assert len(alone) == 2 * 2 * LAYERS and alone.keys() == together.keys()
    for name, results in alone.items():
        for one, other in zip(results, together[name], strict=True):
            assert torch.equal(one, other), f"{name}: {os.environ['RANK']}"
    assert rank.session.begin(2) == "completed"
    rank.session.leave("completed")


main()
