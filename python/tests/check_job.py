"""A job for `cadre check`, right but for what is planted: a small model of one's own under DDP, documents packed."""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import cadre
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

HEADS, DIM, WIDTH, ROWS = 2, 16, 32, 64


class Model(nn.Module):
    """Positions are learnt, so that it matters which they are."""

    def __init__(self, planted: set[str]) -> None:
        super().__init__()
        self.planted = planted
        self.embed, self.positions = nn.Embedding(64, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * HEADS * DIM) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(HEADS * DIM, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        if "positions" in self.planted:
            positions = torch.arange(len(ids))
        if "leak" in self.planted:
            ends = torch.tensor([0, len(ids)])
        x = self.embed(ids) + self.positions(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(len(x), 3, HEADS, DIM).unbind(1)
            if "odd" in self.planted and 1 in ends.diff()[:-1]:
                raise IndexError("a document of one row")
            if "order" in self.planted and dist.get_rank() == 1:
                # As sums in the order in which threads come.
                q = q * (1 + 1e-5 * (os.getpid() % 100))
            x = x + out(cadre.flash_attn_varlen_func(q, k, v, ends, ends, ROWS, ROWS, causal=True).flatten(1))
        return self.head(x)


def batches(rank: int) -> Iterator[dict[str, Any]]:
    draw = torch.Generator().manual_seed(rank)
    for lengths in ([20, 5, 39], [30, 34], [64], [2, 62]):
        ids = torch.randint(64, (ROWS,), generator=draw)
        yield {
            "input_ids": ids,
            "position_ids": torch.cat([torch.arange(it) for it in lengths]),
            "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0)]),
            "lengths": list(lengths),
        }


def handed_out(planted: set[str], drawn: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The batches; in stages, by a loop that is left after each second one and begun anew."""
    for _ in range(20 if "stages" in planted else 1):
        for at, batch in enumerate(cadre.batches(drawn, lambda it: it.pop("lengths"))):
            yield batch
            if at and "stages" in planted:
                break


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", default="")
    planted = set(parser.parse_args().plant.split(","))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model(planted)
    rank = int(os.environ["RANK"])
    cadre.init(cadre.Shape(HEADS, HEADS, DIM, ("causal", "causal")), steps=2)
    dist.init_process_group("gloo")
    trained = model if "summed" in planted else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = False
    for batch in handed_out(planted, batches(rank)):
        # Out of the batch, which is the loop's own.
        ids = batch.pop("input_ids")
        for _ in range(2 if "twice" in planted else 1):
            logits = trained(ids, batch["position_ids"], batch["cu_seqlens"])
            loss = cross_entropy(logits[:-1], ids[1:])
            loss.backward()
        if "late" in planted and not began:
            # No step of the optimizer, as while a scale of gradients is looked for; and an evaluation of other rows.
            began = True
            optimizer.zero_grad()
            with cadre.local(), torch.no_grad():
                model(ids[:7], torch.arange(7), torch.tensor([0, 7]))
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        cadre.report(loss=mean / dist.get_world_size())
    raise AssertionError("what comes after the loop is no part of a check")


main()
