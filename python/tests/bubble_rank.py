"""A rank that measures what a layer in place on the GPU takes beside its kernels alone.

In: the environment of a job of one rank; `--emulated`, the emulated driver is on the library path: then there are few
rows, and its times are the emulator's. Out: a line `bubble: …` with milliseconds of a layer, forward and backward: of
a call in a step, of the same call under `local()`, whose kernels run on torch's stream, and the difference. The host
waits for the GPU before and after each call, so nothing of it is hidden. `make gpu-check` packs it.
"""

import statistics
import sys
import time

import cadre
import torch
from cadre._attention import attend
from gpu_memory import of_words

EMULATED = "--emulated" in sys.argv
ROWS, LAYERS, STEPS = (128, 2, 2) if EMULATED else (16384, 4, 6)
HEADS, KV_HEADS, DIM = (2, 1, 64) if EMULATED else (32, 8, 128)


def main() -> None:
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, ("causal",) * LAYERS), steps=STEPS, device="cuda:0")
    gpu = of_words(sys.argv, own_stream=False)
    given = [gpu.tensor(torch.randn(ROWS, it, DIM).bfloat16()).requires_grad_() for it in (HEADS, KV_HEADS, KV_HEADS)]
    gradient, ends = gpu.tensor(torch.randn(ROWS, HEADS, DIM).bfloat16()), torch.tensor([0, ROWS], dtype=torch.int32)
    taken: dict[tuple[str, str], list[float]] = {}

    def timed(what: tuple[str, str], call):
        gpu.wait()
        began = time.perf_counter()
        found = call()
        gpu.wait()
        taken.setdefault(what, []).append(1e3 * (time.perf_counter() - began))
        return found

    def layers(where: str) -> None:
        each = range(LAYERS)
        outputs = [timed((where, "forward"), lambda: attend(*given, ends, None, mask="causal"))[0] for _ in each]
        for o in reversed(outputs):
            timed((where, "backward"), lambda o=o: torch.autograd.grad(o, given, gradient))

    for _ in range(STEPS):
        assert cadre.begin_step([ROWS])
        layers("in place")
        with cadre.local():
            layers("kernels")
    cadre.finish()
    # The first step loads kernels and makes room.
    first = LAYERS
    told = []
    for way in ("forward", "backward"):
        here, alone = (statistics.median(taken[where, way][first:]) for where in ("in place", "kernels"))
        told.append(f"{way} {here:.2f} ms, kernels {alone:.2f}, bubble {here - alone:.2f}")
    print(f"bubble: {ROWS} rows, heads {HEADS}:{KV_HEADS}, dim {DIM}: {'; '.join(told)}", flush=True)


main()
