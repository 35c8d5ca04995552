"""A small Llama 3 of torchtitan, with random weights, learns the King James Bible; its core attention runs on the pool.

    command: [python, examples/pytorch_torchtitan.py]

The override that this script applies is what `--override.imports cadre.torchtitan.attention` applies in torchtitan's
own trainer, which asks for a GPU. In: books in `examples/bible`, as pytorch_books.py packs them. Out: a line a step.
What is Cadre's here is marked.
"""

import argparse
import os

import cadre
import cadre.torchtitan
import torch
import torch.distributed as dist
from pytorch_books import packed
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.llama3 import Llama3Model, llama3_configs


def configuration(*overrides: str) -> Llama3Model.Config:
    """The one that torchtitan debugs with, of two layers; its attention is replaced by Cadre's."""
    config = llama3_configs["debugmodel"]("varlen")
    config.layers = config.layers[:2]
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config


def llama(config: Llama3Model.Config) -> Llama3Model:
    """Every process makes the same weights."""
    torch.manual_seed(1)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def loss_of(model: Llama3Model, batch: dict[str, Tensor]) -> Tensor:
    positions = batch["position_ids"]
    # Torchtitan's masks: documents begin where positions do.
    logits = model(batch["input_ids"], positions, model.get_attention_masks(positions))
    return cross_entropy(logits[0, :-1], batch["labels"][0, 1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank and step")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    config = configuration("cadre.torchtitan.attention")
    # Cadre: joins the job, with the heads and layers of the configuration.
    cadre.init(cadre.torchtitan.shape(config), steps=options.steps)
    dist.init_process_group("gloo")
    model = llama(config)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for it in (*model.layers.values(), model):
        fully_shard(it, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Cadre: each batch is a step of the pool; the documents of the next one are announced meanwhile.
    for step, batch in enumerate(cadre.batches(packed(rank, options.tokens))):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        cadre.report(loss=mean / ranks)  # Cadre: for the steps' log and the live view
        print(f"step {step} loss {mean.item() / ranks:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
