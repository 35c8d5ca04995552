"""A model of one's own, with nothing but PyTorch, under DDP or FSDP2; its core attention runs on the pool.

    command: [torchrun, examples/pytorch_plain.py]

In: books in `examples/bible`, as pytorch_books.py packs them. Out: a line an update, of two batches each. What is
Cadre's here is marked.
"""

import argparse
import os

import cadre
import torch
import torch.distributed as dist
from pytorch_books import packed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, KV_HEADS, DIM, LAYERS = 128, 4, 2, 32, 3
ACCUMULATE = 2


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """FlashAttention's call; Cadre's in its place."""
    return cadre.flash_attn_varlen_func(q, k, v, ends, ends, len(q), len(q), causal=True)


def rotated(rows: Tensor, positions: Tensor) -> Tensor:
    turns = positions[:, None] * 10000 ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    one, other = rows.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Block(nn.Module):
    def __init__(self, attention=attend) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).view(len(x), -1, DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        rows = self.attention(rotated(q, positions), rotated(k, positions), v, ends)
        x = x + self.out(rows.flatten(1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Model(nn.Module):
    """The loss of a packed batch of bytes."""

    def __init__(self, attention=attend) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def logits(self, ids: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        x = self.embed(ids)
        for it in self.blocks:
            x = it(x, positions, ends)
        return self.head(x)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["input_ids"][0], batch["position_ids"][0], batch["cu_seq_lens_q"])
        return cross_entropy(logits[:-1], batch["labels"][0, 1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank and batch")
    parser.add_argument("--sharding", choices=("ddp", "fsdp2"), default="ddp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Cadre: joins the job, with the heads and the kind of each layer.
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=options.steps)
    dist.init_process_group("gloo")
    model = Model()
    if options.sharding == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        for it in (*model.blocks, model):
            fully_shard(it, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = torch.zeros(())
    # Cadre: an update is a step of the pool; the documents of the next one are announced meanwhile.
    for batch in (feed := cadre.batches(packed(rank, options.tokens), accumulate=ACCUMULATE)):
        # Gradients are summed over ranks once an update.
        if options.sharding == "ddp":
            model.require_backward_grad_sync = feed.is_last
        else:
            model.set_requires_gradient_sync(feed.is_last)
        loss = model(batch) / feed.micro_batches
        loss.backward()
        total += loss.detach()
        if feed.is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            cadre.report(loss=total / ranks)  # Cadre: for the steps' log and the live view
            print(f"loss {total.item() / ranks:.6f}", flush=True)
            total.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
