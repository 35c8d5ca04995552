"""A small Llama of transformers, with random weights, learns the King James Bible; its core attention runs on the pool.

    make demo-pytorch

In: the books in `examples/bible`, cut at lengths with a long tail, and packed over all ranks: documents go on in the
next one; `--model` for a Qwen whose last layers have windows, or a gpt-oss with windows and sinks. Out: a line a step;
with `--checkpoints` files from which another attempt goes on. `cadre run` starts the ranks; started by hand, it is one
rank without a pool. What is Cadre's here is marked.
"""

import argparse
import os
from pathlib import Path

import cadre
import cadre.transformers
import torch
import torch.distributed as dist
from pytorch_books import documents, packed
from pytorch_models import MODELS
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel


def resume(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
    """The steps that are done, by the newest checkpoint of a former attempt."""
    files = {int(it.stem.removeprefix("step-")): it for it in folder.glob("step-*.pt")}
    if not files:
        return 0
    saved = torch.load(files[max(files)])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return max(files)


def save(folder: Path, done: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{done}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)
    cadre.saved(done, file)  # Cadre: restarts before it no longer count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--whole", action="store_true", help="each rank has documents of its own")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile: compile the layers, each for itself")
    parser.add_argument("--checkpoints", type=Path, help="folder of the files to go on from")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(options.threads)
    model = MODELS[options.model]("cadre")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    done = resume(options.checkpoints, model, optimizer) if options.checkpoints else 0
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    # Cadre: joins the job, with the steps that are left, or none: who computes, and what all ranks agree on.
    cadre.init(model, steps=max(0, options.steps - done))
    for it in model.model.layers if options.compile else ():
        it.compile(backend=options.compile, fullgraph=True)
    whole = model
    if ranks > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if options.whole:
        updates = packed(rank, options.tokens)
    else:
        # Cadre: what this rank holds of documents that every rank draws alike.
        updates = (cadre.pack(documents(it, ranks * options.tokens)) for it in range(done, options.steps))
    # Cadre: each batch is a step of the pool; the lengths of the next one are announced meanwhile.
    for batch in cadre.batches(updates):
        # Of packed documents this rank's part of the loss; DDP averages gradients, and these are a sum.
        loss = model(**batch).loss / ranks if options.whole else model(**batch.inputs()).loss
        (loss * ranks).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        # Cadre: for the steps' log and the live view.
        cadre.report(loss=total, gradient_norm=norm, learning_rate=options.lr)
        done += 1
        if rank == 0:
            print(f"step {done} loss {total.item():.6f}", flush=True)
            if options.checkpoints and done % options.save_every == 0:
                save(options.checkpoints, done, whole, optimizer)
    # Cadre: the loop has ended early, since the job was asked to stop.
    if cadre.stopped() and rank == 0 and options.checkpoints:
        save(options.checkpoints, done, whole, optimizer)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
