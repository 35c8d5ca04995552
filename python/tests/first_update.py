"""Runs a script of a rank, and saves what its first update comes from: the sum of the losses that it calls backward
for, and the gradients that its optimizer gets.

    first_update.py OUT SCRIPT ARGUMENTS...

In: a script that trains with torch, whatever calls it. Out: `update-RANK.pt` in the folder OUT; all else is the
script's own.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

out, script = Path(sys.argv[1]), Path(sys.argv[2])
losses: list[float] = []
backward = torch.Tensor.backward


def told(loss: torch.Tensor, *arguments: Any, **more: Any) -> None:
    losses.append(float(loss.detach()))
    backward(loss, *arguments, **more)


def save(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    file = out / f"update-{os.environ['RANK']}.pt"
    if not file.exists():
        all_of_them = [it.grad for group in optimizer.param_groups for it in group["params"]]
        # Of FSDP2 a rank holds a part.
        gradients = [it.full_tensor() if isinstance(it, DTensor) else it.clone() for it in all_of_them]
        torch.save((sum(losses), gradients), file)


torch.Tensor.backward = told
register_optimizer_step_pre_hook(save)
sys.argv = sys.argv[2:]
sys.path.insert(0, str(script.parent))
runpy.run_path(str(script), run_name="__main__")
