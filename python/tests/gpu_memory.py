"""Tensors in memory of a GPU: of a real one, or of the emulated one where the library path names its driver.

Memory of that lies in the process, so torch can look at it as at a tensor of the CPU once the stream has come to it;
before, it is poison. Torch itself knows no emulated GPU: `as_cuda` says in its place what is asked of tensors of a GPU.
"""

import ctypes
from pathlib import Path

import cadre._place
import torch


def driver(programs: Path) -> Path | None:
    """The folder of its driver, if the tests in Rust have built one, and there are kernels for it."""
    drivers = sorted(programs.glob("emulated-gpu-*/driver/libcuda.so.1"), key=lambda it: it.stat().st_mtime)
    has_kernels = any((programs.parent / "kernels").glob("forward.cubin"))
    return drivers[-1].parent if drivers and has_kernels else None


class EmulatedGpu:
    def __init__(self, *, own_stream: bool) -> None:
        """Tensors are made on a stream of their own, or on the default one."""
        self.library, self.stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self.begins: set[tuple[int, int]] = set()
        if own_stream:
            self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} of the emulated driver: {code}")

    def room(self, shape, beside: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `cadre._place.room`; it is never freed, since a test makes few."""
        dtype = dtype or beside.dtype
        size, address = torch.Size(shape).numel() * dtype.itemsize, ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.begins.add((address.value, address.value + size))
        memory = (ctypes.c_uint8 * size).from_address(address.value)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def tensor(self, numbers: torch.Tensor) -> torch.Tensor:
        """A copy that is there once the stream has come to it."""
        made, numbers = self.room(numbers.shape, numbers), numbers.contiguous()
        size = ctypes.c_size_t(numbers.numel() * numbers.itemsize)
        pointers = ctypes.c_uint64(made.data_ptr()), ctypes.c_void_p(numbers.data_ptr())
        self.call("cuMemcpyHtoDAsync_v2", *pointers, size, self.stream)
        return made

    def wait(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < end for start, end in self.begins)

    def as_cuda(self) -> None:
        """From here on the package takes tensors of this memory for those of a GPU."""
        on_host = cadre._place.room
        behind = (0, self.stream.value or 0)
        cadre._place.lent = lambda it: behind if self.holds(it) else None
        cadre._place.room = lambda shape, beside, dtype=None: (self.room if self.holds(beside) else on_host)(
            shape, beside, dtype
        )


class Cuda:
    """A real one; has what an `EmulatedGpu` has."""

    def __init__(self, *, own_stream: bool) -> None:
        if own_stream:
            torch.cuda.set_stream(torch.cuda.Stream())

    def tensor(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to("cuda", non_blocking=True)

    def room(self, shape, beside: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or beside.dtype, device="cuda")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


def of_words(words: list[str], *, own_stream: bool) -> EmulatedGpu | Cuda:
    """The emulated one if `--emulated` is said."""
    if "--emulated" not in words:
        return Cuda(own_stream=own_stream)
    gpu = EmulatedGpu(own_stream=own_stream)
    gpu.as_cuda()
    return gpu
