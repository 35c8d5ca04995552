"""Attention of packed documents in PyTorch by Cadre's GPU kernels through their C face, forward and backward.

LD_LIBRARY_PATH=target/release python3 kernels/c/examples/attention.py
"""

import ctypes as c
import weakref
from functools import cache, lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention as peer

lib = c.CDLL("libcadre_attention.so")
lib.cadre_error.restype = c.c_char_p


class Shape(c.Structure):
    numbers = ("query_heads", "kv_heads", "dim", "segment", "blocks", "fixed_order", "launches")
    _fields_ = [*((it, c.c_uint32) for it in numbers), ("scale", c.c_float), ("softcap", c.c_float)]


def call(name, *arguments, result=c.c_int32):
    function = getattr(lib, "cadre_" + name)
    function.restype = result
    given = function(*(c.c_void_p(it) if isinstance(it, int) else it for it in arguments))
    if given in (None, -1):
        raise RuntimeError(lib.cadre_error().decode())
    return given


def tensors(*them):
    """Their addresses and numbers, as the library takes them."""
    return (c.c_uint64 * (2 * len(them)))(*(n for it in them for n in (it.data_ptr(), it.numel())))


@cache
def gpu(ordinal):
    """Open as long as the process."""
    return call("open", ordinal, result=c.c_void_p)


class Plan:
    """Tiles of a batch on a GPU, forward or backward: made once, run for every layer."""

    def __init__(self, way, ordinal, heads, documents, stream):
        lines, at = [], 0
        for number, rows in enumerate(documents):  # mask 1: causal
            lines += [1, rows, 0, rows, at, 0, rows, at, at, number]
            at += rows
        self.gpu = gpu(ordinal)
        shape, tasks = Shape(*heads, 0, 0, 1, 1, heads[2] ** -0.5, 0), (c.c_uint32 * len(lines))(*lines)
        self.handle = call(f"{way}_plan", self.gpu, None, stream, shape, tasks, len(documents), result=c.c_void_p)
        weakref.finalize(self, getattr(lib, f"cadre_{way}_free"), c.c_void_p(self.handle))


plan_of = lru_cache(maxsize=16)(Plan)  # the newest batches


class Attention(torch.autograd.Function):
    @staticmethod
    def run(way, q, k, documents, *of):
        assert all(it.is_contiguous() and it.device == q.device for it in of), "contiguous tensors of one GPU"
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        plan = plan_of(way, q.device.index or 0, (q.shape[1], k.shape[1], q.shape[2]), tuple(documents), stream)
        call(f"{way}_run", plan.gpu, plan.handle, stream, tensors(*of), 0)
        if not q.is_cuda:  # PyTorch waits for streams of its own alone
            call("wait", plan.gpu, stream, 60_000)

    @staticmethod
    def forward(ctx, q, k, v, documents):
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        Attention.run("forward", q, k, documents, q, k, v, o, lse)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.documents = documents
        return o

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, o, lse), dout = ctx.saved_tensors, dout.contiguous()
        delta = (dout.float() * o.float()).sum(-1)
        grads = [torch.empty_like(it, dtype=torch.float32) for it in (q, k, v)]
        Attention.run("backward", q, k, ctx.documents, q, dout, k, v, lse, delta, *grads)
        return (*(it.to(q.dtype) for it in grads), None)


documents, device = [170, 1, 129], "cuda" if torch.cuda.is_available() else "cpu"  # an emulated GPU is the host
q, k, v = (torch.randn(300, h, 64, device=device).bfloat16().requires_grad_() for h in (4, 2, 2))
parts = zip(*(it.double().transpose(0, 1).split(documents, 1) for it in (q, k, v)), strict=True)
theirs = torch.cat([peer(*it, is_causal=True, enable_gqa=True) for it in parts], 1).transpose(0, 1)
both = Attention.apply(q, k, v, documents), theirs
results = [[o, *torch.autograd.grad(o.double().square().sum(), (q, k, v))] for o in both]
for name, a, b in zip(("O", "dQ", "dK", "dV"), *results, strict=True):
    worst = ((a - b).abs().max() / b.abs().max()).item()
    print(f"{name}: largest difference {worst:.4f} of the largest")
    assert worst < 0.02, name
