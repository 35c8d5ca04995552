"""Attention that the kernels of GPUs compute in this process, beside the same on the CPU.

In: a GPU; `--emulated`, the emulated driver is on the library path. Out: an exception where both differ by more than
bf16 does, or where a batch that comes again has other bits. `make gpu-check` packs it.
"""

import ctypes
import sys

import cadre
import torch
from cadre import _local, _native
from cadre._attention import attend
from gpu_memory import Cuda, EmulatedGpu, of_words
from refusals import refused

LENGTHS = [70, 1, 60]
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(gpu: EmulatedGpu | Cuda | None, dim: int, **how) -> list[torch.Tensor]:
    """O, LSE, dQ, dK and dV."""
    place = gpu.tensor if gpu else torch.Tensor.clone
    inputs = [place(numbers(it, sum(LENGTHS), heads, dim)).requires_grad_() for it, heads in enumerate((4, 2, 2))]
    gradients = place(numbers(3, sum(LENGTHS), 4, dim)), place(numbers(4, sum(LENGTHS), 4).float())
    outputs = attend(*inputs, ENDS, None, **how)
    if gpu:
        # Torch's own operators between both are not on that stream.
        gpu.wait()
        assert all(gpu.holds(it) for it in outputs), "a result is on the host"
    return [*(it.detach() for it in outputs), *torch.autograd.grad(outputs, inputs, gradients)]


class Asks(torch.autograd.Function):
    """Whether its backward, which torch calls in a thread of the GPU's, is under `local()`."""

    @staticmethod
    def forward(ctx, rows, said):
        ctx.said = said
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.said.append((_local.under_local(), _local.says_whole()))
        return gradient, None


def main() -> None:
    gpu = of_words(sys.argv, own_stream=True)
    said: list[tuple[bool, bool]] = []
    asked = Asks.apply(gpu.tensor(torch.ones(3)).requires_grad_(), said).sum()
    asked.backward(retain_graph=True)
    with cadre.local(whole=True):
        asked.backward(retain_graph=True)
    asked.backward()
    assert said == [(False, False), (True, True), (False, False)], said
    backward = _native.gpu_backward

    def waited(*arguments: object) -> None:
        backward(*arguments)
        gpu.wait()

    _native.gpu_backward = waited
    for dim, how in (
        (64, {"mask": "causal"}),
        (128, {"mask": "window:20", "chunk": 33, "scale": 0.1}),
        (64, {"mask": "full"}),
    ):
        expected, found, again = results(None, dim, **how), results(gpu, dim, **how), results(gpu, dim, **how)
        for name, on_cpu, on_gpu, second in zip(("O", "LSE", "dQ", "dK", "dV"), expected, found, again, strict=True):
            far = (on_gpu.cpu().float() - on_cpu.float()).abs().max() / on_cpu.float().abs().max()
            assert far < 2e-2, f"{name} of {dim}, {how}: {far}"
            assert on_gpu.dtype == on_cpu.dtype and torch.equal(on_gpu, second), f"{name} of {dim}, {how}"
    rows = gpu.room((3, 2, 64), torch.empty(0, dtype=torch.bfloat16))
    host, behind = torch.zeros(3, 2, 64, dtype=torch.bfloat16), (0, 0)
    lse = gpu.room((3, 2), torch.empty(0))
    for qkv, o, words in (
        ((rows, rows, host), host.clone(), "V lies at 0x"),
        ((rows,) * 3, rows, "O shares memory with Q"),
        ((host,) * 3, rows, "Q lies at 0x"),
    ):
        refused(words, lambda qkv=qkv, o=o: _native.gpu_forward(("causal", behind, [3]), qkv, (o, lse)))
    if isinstance(gpu, EmulatedGpu):
        # A graph would keep the addresses of lists that are dropped after some batches.
        batch, qkv, to = ("causal", (0, gpu.stream.value), [3]), (rows,) * 3, (gpu.room((3, 2, 64), rows), lse)
        gpu.call("cuStreamBeginCapture_v2", gpu.stream, 1)
        refused("leave attention out of the recording", lambda: _native.gpu_forward(batch, qkv, to))
        gpu.call("cuStreamEndCapture", gpu.stream, ctypes.byref(ctypes.c_void_p()))
        _native.gpu_forward(batch, qkv, to)
    assert "GPU 7" in _native.gpu_refuses(7)
    # No GPU's kernels take these.
    assert cadre._place.kernels(rows[..., :8], torch.bfloat16) is None
    assert cadre._place.kernels(rows, torch.float32) is None
    print("the same on both")


main()
