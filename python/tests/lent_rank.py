"""A rank whose tensors lie on a GPU in every other step, and on the host between: the same bits.

In: the environment of a job; `--emulated`, the emulated driver is on the library path. Out: an exception where results
differ. `make gpu-check` packs it.
"""

import os
import sys

import cadre
import torch
from cadre._attention import attend
from gpu_memory import of_words
from refusals import refused

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2
# By rank: documents that lie whole on it, and one that goes on.
LAYOUTS = [
    [cadre.Stretch(0, 70, 0, 70), cadre.Stretch(1, 150, 0, 90)],
    [cadre.Stretch(1, 150, 90, 150), cadre.Stretch(2, 33, 0, 33)],
]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(rank: int, dtype: torch.dtype, place) -> list[torch.Tensor]:
    """O, LSE and the gradients of all layers, as they were when all was asked for."""
    rows = sum(it.end - it.start for it in LAYOUTS[rank])
    inputs, outputs, gradients = [], [], []
    for layer in range(LAYERS):
        seed = 100 * rank + 10 * layer
        # Q, K and V side by side in the rows of one tensor.
        all_three = place(numbers(seed, rows, HEADS + 2 * KV_HEADS, DIM).to(dtype))
        inputs += [it.requires_grad_() for it in all_three.detach().split([HEADS, KV_HEADS, KV_HEADS], 1)]
        outputs += attend(*inputs[-3:], None, None, mask="causal")
        gradients += [place(numbers(seed + 1, rows, HEADS, DIM).to(dtype)), place(numbers(seed + 2, rows, HEADS))]
    return [it.detach() for it in (*outputs, *torch.autograd.grad(outputs, inputs, gradients))]


def compare(what: str, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    for at, both in enumerate(zip(expected, (it.cpu() for it in found), strict=True)):
        assert torch.equal(*both), f"{what}: result {at} differs by up to {(both[0] - both[1]).abs().max()}"


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    types = (torch.float32, torch.bfloat16)
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=2 * len(types))
    gpu = of_words(sys.argv, own_stream=rank == 0)
    session, rows = cadre._job.current().session, gpu.tensor(torch.zeros(1, 1, DIM))
    refused("rows on GPU 99 cannot be used there", lambda: session.submit((0, 0), (rows,) * 3, lent=(99, 0)))
    for dtype in types:
        assert cadre.begin_step(LAYOUTS[rank])
        expected = results(rank, dtype, torch.Tensor.clone)
        assert cadre.begin_step(LAYOUTS[rank])
        found = results(rank, dtype, gpu.tensor)
        for at, it in enumerate(found):
            assert gpu.holds(it), f"result {at} is on the host"
        gpu.wait()
        compare(f"{dtype}", expected, found)
    # Beside the steps, where rows of a GPU are computed on the host.
    with cadre.local():
        rows, ends = numbers(7, 20, HEADS + 2 * KV_HEADS, DIM), torch.tensor([0, 12, 20], dtype=torch.int32)
        given = gpu.tensor(rows)
        gpu.wait()
        both = [attend(*it.split([HEADS, KV_HEADS, KV_HEADS], 1), ends, None, mask="causal") for it in (rows, given)]
        compare("local", *both)
    cadre.finish()
    print(f"rank {rank}: results of the GPU's rows have the bits of the host")


main()
