"""Correctness of the GPU kernels on fresh random inputs, against PyTorch in f64 and f32.

In: the library, a seed. Out: rows of a report, each with what was compared, the error and whether it passes. Outputs
are NaN before a launch, so a number that is not written never passes. Bits are compared over ten runs, over cuts of
the rows (O, LSE, and dQ in fixed order), over launches and over numbers of blocks.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from cases import Batch, Results, Tensors, reference
from ours import FULL, Backward, Forward, Heads, Library, Line, window

# Root mean square of the differences over that of the reference. P and dS are rounded to bf16, O too; LSE is not. The
# GPU's tanh, and so every score under a softcap, is right to 2^-11.
TOLERANCE = {"O": 5e-3, "LSE": 1e-5, "dQ": 5e-3, "dK": 5e-3, "dV": 5e-3}
TOLERANCE_SOFTCAP = TOLERANCE | {"LSE": 5e-4, "dQ": 6e-3, "dK": 6e-3}


def small(heads: Heads) -> Batch:
    """Every kind of edge in one launch."""
    batch = Batch("all edges", heads)
    batch.document(1, [(0, 1)])
    batch.document(300, [(299, 300)])
    batch.document(256, [(0, 256)])
    batch.document(150, [(0, 37), (37, 150)])
    batch.document(200, [(131, 200)])
    batch.document(129, [(3, 40)], FULL)
    batch.document(400, [(0, 400)], window(70), 400)
    batch.document(150, [(0, 150)], window(0), 150)
    batch.document(300, [(0, 40), (40, 64), (64, 130), (200, 201), (210, 300)])
    return batch


def medium(heads: Heads) -> Batch:
    batch = Batch("documents of up to 2K", heads)
    for rows in (2048, 700, 1333, 64):
        batch.document(rows, [(0, rows)])
    batch.document(1500, [(700, 1500)], FULL)
    return batch


def large(heads: Heads) -> Batch:
    batch = Batch("8K, tasks", heads)
    batch.document(8192, [(0, 128), (1000, 2000), (4096, 8192)])
    return batch


class Runner:
    """Runs a batch forward and backward; keeps nothing between runs but the plans."""

    def __init__(self, library: Library, batch: Batch, tensors: Tensors, **how: int) -> None:
        launches = how.pop("launches", 1)
        fixed = bool(how.pop("fixed", 1))
        blocks = how.get("blocks", 0)
        cap = batch.softcap
        self.library, self.batch, self.tensors = library, batch, tensors
        self.forward = Forward(library, batch.heads, batch.lines, softcap=cap, **how)
        self.backward = Backward(library, batch.heads, batch.lines, fixed, launches, blocks, cap)

    def run(self, lse: torch.Tensor | None = None, delta: torch.Tensor | None = None) -> Results:
        """With LSE and Δ for the backward pass; own ones where none are given."""
        t, r = self.tensors, Results.poisoned(self.batch, self.library.device)
        self.forward.run(t.q, t.k, t.v, r.out, r.lse)
        self.library.wait()
        lse = r.lse if lse is None else lse.float().contiguous()
        if delta is None:
            delta = (t.dout.float() * r.out.float()).sum(-1)
        delta = delta.float().contiguous()
        self.backward.run(t.q, t.dout, t.k, t.v, lse, delta, r.dq, r.dk, r.dv)
        self.library.wait()
        return r


def parts(results: Results) -> dict[str, torch.Tensor]:
    names = {"O": results.out, "LSE": results.lse, "dQ": results.dq, "dK": results.dk, "dV": results.dv}
    return names


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    same = actual == expected  # infinities too
    difference = torch.where(same, 0.0, actual - expected)
    size = torch.where(expected.isfinite(), expected, 0.0).square().mean().clamp_min(1e-30)
    return (difference.square().mean() / size).sqrt().item()


def compare(library: Library, batch: Batch, seed: int, dtype: torch.dtype) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    right, delta = reference(batch, tensors, dtype)
    ours = Runner(library, batch, tensors).run(right.lse, delta)
    name = f"{batch.heads}, {batch.name}, against {str(dtype).removeprefix('torch.')}"
    if batch.softcap:
        name += f", softcap {batch.softcap:g}"
    tolerance = TOLERANCE_SOFTCAP if batch.softcap else TOLERANCE
    expected = parts(right)
    for what, actual in parts(ours).items():
        off = error(actual, expected[what])
        # NaN is not at most anything.
        yield {"check": name, "what": what, "error": off, "passed": off <= tolerance[what]}


def equal(what: str, batch: Batch, first: Results, second: Results, names: tuple[str, ...]) -> Iterator[dict]:
    a, b = parts(first), parts(second)
    for name in names:
        # As integers: NaN is no excuse, and −0 is not 0.
        kind = torch.int16 if a[name].dtype == torch.bfloat16 else torch.int32
        differ = (a[name].view(kind) != b[name].view(kind)).sum().item()
        yield {"check": f"{batch.heads}, {what}", "what": f"bits of {name}", "error": differ, "passed": differ == 0}


def cut(batch: Batch, size: int) -> Batch:
    """The same rows in tasks of `size` rows, still one bundle a document."""
    other = Batch(batch.name, batch.heads, [], batch.q_rows, batch.kv_rows, softcap=batch.softcap)
    for it in batch.lines:
        for begin in range(it.rows_begin, it.rows_end, size):
            piece = Line.from_buffer_copy(it)
            piece.q_row += begin - it.rows_begin
            piece.rows_begin, piece.rows_end = begin, min(begin + size, it.rows_end)
            other.lines.append(piece)
    return other


ALL = ("O", "LSE", "dQ", "dK", "dV")


def bits(library: Library, batch: Batch, seed: int, runs: int) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    runner = Runner(library, batch, tensors)
    first = runner.run()
    for index in range(1, runs):
        rows = list(equal(f"run {index + 1} of {runs}", batch, first, runner.run(), ALL))
        if index == runs - 1 or not all(it["passed"] for it in rows):
            yield from rows
    lse, delta = first.lse, (tensors.dout.float() * first.out.float()).sum(-1)
    again = Runner(library, cut(batch, 90), tensors).run(lse, delta)
    yield from equal("other cuts of the rows", batch, first, again, ("O", "LSE", "dQ"))
    again = Runner(library, batch, tensors, launches=3, blocks=2).run(lse, delta)
    yield from equal("three launches of two blocks", batch, first, again, ALL)
    again = Runner(library, batch, tensors, fixed=0).run(lse, delta)
    yield from equal("dQ in order of arrival", batch, first, again, ("O", "LSE", "dK", "dV"))
    for name, off in [("dQ in order of arrival", error(again.dq, first.dq))]:
        yield {"check": f"{batch.heads}, {name}", "what": "dQ", "error": off, "passed": off <= 1e-5}


def sinks(library: Library, batch: Batch, seed: int) -> Iterator[dict]:
    """O and LSE with a number a head that is a key without a value."""
    tensors = Tensors.random(batch, library.device, seed)
    right, _ = reference(batch, tensors, torch.float64)
    numbers = torch.linspace(-3, 8, batch.heads.query, device=library.device)
    ours = Results.poisoned(batch, library.device, gradients=False)
    forward = Forward(library, batch.heads, batch.lines)
    forward.run(tensors.q, tensors.k, tensors.v, ours.out, ours.lse)
    forward.sink(numbers, ours.out, ours.lse)
    library.wait()
    lse = torch.logaddexp(right.lse, numbers.double())
    out = right.out * torch.exp(right.lse - lse)[:, :, None]
    for what, actual, expected in [("O", ours.out, out), ("LSE", ours.lse, lse)]:
        off = error(actual, expected)
        name = f"{batch.heads}, {batch.name}, sinks, against float64"
        yield {"check": name, "what": what, "error": off, "passed": off <= TOLERANCE[what]}


def check(library: Library, seed: int, tiny: bool) -> Iterator[dict]:
    """Rows of the report; `tiny` where the GPU is emulated."""
    for dim in (64, 128, 256):
        groups = [(2, 2)] if tiny else [(2, 2), (8, 2), (8, 1)]
        for query, kv in groups:
            heads = Heads(query, kv, dim)
            batch = small(heads)
            yield from compare(library, batch, seed + dim + query, torch.float64)
            for softcap in (2.0, 50.0):  # one that bends every score, and one as models use it
                yield from compare(library, replace(batch, softcap=softcap), seed + dim + query, torch.float64)
            yield from sinks(library, batch, seed + dim + query)
            if query == groups[-1][0] and kv == groups[-1][1]:
                yield from bits(library, batch, seed + dim, 2 if tiny else 10)
        if tiny:
            continue
        yield from compare(library, medium(Heads(8, 2, dim)), seed + dim, torch.float64)
        yield from compare(library, large(Heads(4, 1, dim)), seed + dim, torch.float32)
        yield from bits(library, medium(Heads(8, 2, dim)), seed + 1, 10)
        capped = replace(medium(Heads(8, 2, dim)), softcap=30.0)
        yield from compare(library, capped, seed + dim, torch.float64)
        yield from bits(library, capped, seed + 2, 3)
        # A segment of 256 keys, so that parts are merged.
        batch = Batch("segments of 256 keys", Heads(4, 2, dim))
        batch.document(1500, [(0, 1500)])
        tensors = Tensors.random(batch, library.device, seed)
        right, _ = reference(batch, tensors, torch.float64)
        ours = Results.poisoned(batch, library.device, gradients=False)
        Forward(library, batch.heads, batch.lines, segment=256).run(tensors.q, tensors.k, tensors.v, ours.out, ours.lse)
        library.wait()
        for what, actual, expected in [("O", ours.out, right.out), ("LSE", ours.lse, right.lse)]:
            off = error(actual, expected)
            name = f"{batch.heads}, {batch.name}, against float64"
            yield {"check": name, "what": what, "error": off, "passed": off <= TOLERANCE[what]}
