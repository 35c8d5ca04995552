"""A rank whose tensors lie on a GPU in every other step, and on the host between: the same bits.

In: the environment of a job; `--emulated`, the emulated driver is on the library path; `--in-place`, the GPU computes
what the plan gives to the rank. Out: an exception where results differ, or where those of a GPU are further from
torch's attention than bf16 is. `make gpu-check` packs it.
"""

import os
import sys

import cadre
import torch
from cadre._attention import attend
from gpu_memory import of_words
from refusals import refused

IN_PLACE = "--in-place" in sys.argv
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 64 if IN_PLACE else 16, 2
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


def of_torch(rank: int, layer: int) -> list[torch.Tensor]:
    """O, dQ, dK and dV of a layer in f32: of the rows of all ranks, cut down to those of this one."""
    counts = [sum(it.end - it.start for it in layout) for layout in LAYOUTS]
    seeds = [100 * it + 10 * layer for it in range(len(LAYOUTS))]
    heads = HEADS + 2 * KV_HEADS
    made = [numbers(seed, rows, heads, DIM).bfloat16() for seed, rows in zip(seeds, counts, strict=True)]
    douts = [numbers(seed + 1, rows, HEADS, DIM).bfloat16() for seed, rows in zip(seeds, counts, strict=True)]
    dlse = torch.cat([numbers(seed + 2, rows, HEADS) for seed, rows in zip(seeds, counts, strict=True)])
    qkv = [it.requires_grad_() for it in torch.cat(made).float().split([HEADS, KV_HEADS, KV_HEADS], 1)]
    of = torch.repeat_interleave(torch.tensor([70, 150, 33]))
    unseen = (of[:, None] != of) | torch.ones(len(of), len(of)).triu(1).bool()
    q, k, v = (it.repeat_interleave(HEADS // it.shape[1], 1) for it in qkv)
    scores = torch.einsum("qhd,khd->hqk", q, k).mul(DIM**-0.5).masked_fill(unseen, -torch.inf)
    o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    gradients = torch.autograd.grad((o, scores.logsumexp(-1).T), qkv, (torch.cat(douts).float(), dlse))
    begin = sum(counts[:rank])
    return [it[begin : begin + counts[rank]].detach() for it in (o, *gradients)]


def compare_with_torch(rank: int, found: list[torch.Tensor]) -> None:
    for layer in range(LAYERS):
        o, gradients = found[2 * layer], found[2 * LAYERS + 3 * layer :][:3]
        for name, expected, it in zip(("O", "dQ", "dK", "dV"), of_torch(rank, layer), (o, *gradients), strict=True):
            far = (it.cpu().float() - expected).abs().max() / expected.abs().max()
            assert far < 2e-2, f"{name} of layer {layer} is {far} from torch's"


def refuse_bits_of_the_cpu(o: torch.Tensor) -> None:
    """In O of rank 0's first layer: the kernels of GPUs add up in another order."""
    rows = LAYOUTS[0][0].rows
    qkv = numbers(0, len(o), HEADS + 2 * KV_HEADS, DIM)[:rows].bfloat16()
    on_cpu, _ = cadre._here.forward("causal", [rows], *qkv.split([HEADS, KV_HEADS, KV_HEADS], 1))
    assert not torch.equal(o[:rows].cpu(), on_cpu), "attention in place was computed on the CPU"


def compare_on_host(gpu) -> None:
    """Beside the steps, where rows of a GPU that has no kernels for them are computed on the host."""
    with cadre.local():
        rows, ends = numbers(7, 20, HEADS + 2 * KV_HEADS, DIM), torch.tensor([0, 12, 20], dtype=torch.int32)
        given = gpu.tensor(rows)
        gpu.wait()
        both = [attend(*it.split([HEADS, KV_HEADS, KV_HEADS], 1), ends, None, mask="causal") for it in (rows, given)]
        compare("local", *both)


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    types = (torch.bfloat16,) if IN_PLACE else (torch.float32, torch.bfloat16)
    shape = cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS)
    cadre.init(shape, steps=2 * len(types), device="cuda:0" if IN_PLACE else None)
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
        if IN_PLACE:
            compare_with_torch(rank, found)
            if rank == 0:
                refuse_bits_of_the_cpu(found[0])
    assert session.gpu == (0 if IN_PLACE else None)
    if not IN_PLACE:
        compare_on_host(gpu)
    cadre.finish()
    print(f"rank {rank}: results of the GPU's rows have the bits of the host")


main()
