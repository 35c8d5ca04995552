"""The example of torchtitan with torchtitan's own activation checkpointing and compilation of blocks.

    torchtitan_rank.py WHAT ARGUMENTS...

In: the environment of a job, and the example's arguments. WHAT is one of `prepare`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import pytorch_torchtitan

POLICIES = {
    "full": FullAC.Config(),
    "selective": SelectiveAC.Config(),
    # The compiler computes again whatever it can.
    "budget": MemoryBudgetAC.Config(memory_budget=0.0),
}


class Together(torch.nn.Sequential):
    """All blocks as one."""

    def forward(self, rows: torch.Tensor, *more: Any) -> torch.Tensor:
        for it in self:
            rows = it(rows, *more)
        return rows


def prepare(model: torch.nn.Module, what: str) -> torch.nn.Module:
    """`what`: words of `together` (all blocks are one, which is computed again at once), a policy of torchtitan's, and
    `compiled` (each block for itself), in the order in which torchtitan applies them."""
    for it in what.split("+"):
        if it == "together":
            model.layers = torch.nn.ModuleDict({"0": Together(*model.layers.values())})
        elif it == "compiled":
            dims = ParallelDims.from_config(ParallelismConfig(), world_size=1)
            apply_compile(model, compile_config=CompileConfig(enable=True, backend="aot_eager"), parallel_dims=dims)
        elif it != "plain":
            POLICIES[it].build(dump_folder="").apply(model)
    return model


def main() -> None:
    what, make = sys.argv.pop(1), pytorch_torchtitan.llama
    pytorch_torchtitan.llama = lambda config: prepare(make(config), what)
    pytorch_torchtitan.main()


if __name__ == "__main__":
    main()
