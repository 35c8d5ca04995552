"""Correctness of the GPU kernels on fresh random inputs, against PyTorch in f64 and f32.

In: the library, a seed. Out: rows of a report, each with what was compared, the error and whether it passes. Outputs
are NaN before a launch, so a number that is not written never passes. Bits are compared over ten runs, over cuts of
the rows (O, LSE, and dQ in fixed order), over launches and over numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import elements
import torch
from cases import Batch, Results, Tensors, reference
from given import Inputs
from ours import FULL, Backward, Forward, Heads, Library, Line, window

# Root mean square of the differences over that of the reference. P and dS are rounded to bf16, O too; LSE is not. The
# GPU's tanh, and so every score under a softcap, is right to 2^-11.
TOLERANCE = {"O": 5e-3, "LSE": 1e-5, "dQ": 5e-3, "dK": 5e-3, "dV": 5e-3}
# How many times that a row of a head may be off, and a tile of keys; smaller ones than this share of the table's root
# mean square are taken for as large.
ROW, TILE, FLOOR = 16, 4, 1e-2
TILE_KEYS = 64
FORWARD, BACKWARD = ("O", "LSE"), ("dQ", "dK", "dV")
# The kernel that turns the sums of dQ into dQ, also for rows that stay on the GPU.
FINISH, IN_BF16 = "cadre_finish_dq", "dQ in bf16"
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
    """A batch, forward and backward; keeps nothing between runs but the plans, made once for a way to launch."""

    def __init__(self, library: Library, batch: Batch, tensors: Tensors) -> None:
        self.library, self.batch, self.tensors = library, batch, tensors
        self.plans: dict[tuple, Forward | Backward] = {}

    def plan(self, kind: type, **how: int) -> Forward | Backward:
        key = (kind, *sorted(how.items()))
        if key not in self.plans:
            batch = self.batch
            self.plans[key] = kind(self.library, batch.heads, batch.lines, softcap=batch.softcap, **how)
        return self.plans[key]

    def forward(self, **how: int) -> Results:
        t, r = self.tensors, Results.poisoned(self.batch, self.library.device, gradients=False)
        self.plan(Forward, **how).run(t.q, t.k, t.v, r.out, r.lse)
        self.library.wait()
        return r

    def backward(
        self, lse: torch.Tensor, delta: torch.Tensor, fixed: bool = True, dq: torch.dtype = torch.float32, **how: int
    ) -> Results:
        """Backward with LSE and Δ of the reference: a forward pass that is wrong, or hangs, is not in the way."""
        t, r = self.tensors, Results.poisoned(self.batch, self.library.device)
        r.dq = r.dq.to(dq)
        lse, delta = (it.float().contiguous() for it in (lse, delta))
        self.plan(Backward, fixed=fixed, **how).run(t.q, t.dout, t.k, t.v, lse, delta, r.dq, r.dk, r.dv)
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


def worst(batch: Batch, what: str, actual: torch.Tensor, expected: torch.Tensor, bound: float) -> str:
    """The row of a head, or of dK and dV also the tile of keys, that is off most beyond what it may be; else nothing.

    A few that are grossly wrong are few numbers of many: the error of the whole table does not show them.
    """
    a, b = (it.double().reshape(*it.shape[:2], -1) for it in (actual, expected))
    off = torch.where(a == b, 0.0, a - b).square().mean(-1)
    size = torch.where(b.isfinite(), b, 0.0).square().mean(-1)
    # Rows of LSE count as large as their mean: a logarithm is as exact near 0 as elsewhere.
    floor = (size.mean() * (1 if what == "LSE" else FLOOR**2)).clamp_min(1e-30)
    found = [("row", torch.arange(len(off), device=off.device), off, size, ROW)]
    if what in ("dK", "dV"):
        begins, tiles = [], torch.zeros(len(off), dtype=torch.long, device=off.device)
        for row, begin, end in sorted({(it.dkv_row, it.keys_begin, it.keys_end) for it in batch.lines}):
            for tile in range(begin // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
                first, last = max(tile, begin) - begin, min(tile + TILE_KEYS, end) - begin
                tiles[row + first : row + last] = len(begins)
                begins.append(row + first)
        counts = torch.bincount(tiles, minlength=len(begins))[:, None]
        sums = [torch.zeros(len(begins), it.shape[1]).to(it).index_add_(0, tiles, it) / counts for it in (off, size)]
        found.append(("tile of keys from row", torch.tensor(begins), *sums, TILE))
    beyond = []
    for name, begins, of, sizes, most in found:
        # A NaN counts as the largest error.
        times = (of / sizes.maximum(floor)).sqrt().div(bound * most).nan_to_num(nan=torch.inf)
        at = int(times.argmax())
        row, head = int(begins[at // times.shape[1]]), at % times.shape[1]
        beyond.append((times.max().item(), f"{name} {row} of head {head}"))
    times, name = max(beyond)
    return f"{name} is off by {times:.1f} times what it may be" if times > 1 else ""


def rows_of(
    inputs: Inputs, names: tuple[str, ...], ours: Results, right: Results, *words: str, kernel: str = ""
) -> list[dict]:
    batch = inputs.batch
    tolerance = TOLERANCE_SOFTCAP if batch.softcap else TOLERANCE
    actual, expected = parts(ours), parts(right)
    rows = []
    for what in names:
        off = error(actual[what], expected[what])
        where = worst(batch, what, actual[what], expected[what], tolerance[what])
        # Written so that a NaN fails: no comparison with NaN is true.
        passed = off <= tolerance[what] and not where
        row = {"check": title(batch, *words), "what": what, "error": off, "passed": passed}
        row["kernel"] = kernel or kernel_of(batch, "forward" if names == FORWARD else "backward")
        if not passed:
            row |= {"worst": where} if where else {}
            row["wrong"] = elements.wrong(inputs, what, actual[what], expected[what], tolerance[what])
        rows.append(row)
    return rows


def kernel_of(batch: Batch, direction: str) -> str:
    return f"cadre_{direction}_{batch.heads.dim}{'_softcap' if batch.softcap else ''}"


def against(dtype: torch.dtype) -> str:
    return f"against {str(dtype).removeprefix('torch.')}"


def title(batch: Batch, *words: str) -> str:
    capped = [f"softcap {batch.softcap:g}"] if batch.softcap else []
    return ", ".join([str(batch.heads), batch.name, *words, *capped])


def at(batch: Batch, direction: str, *words: str) -> dict:
    """A line for the parent: which unit comes next, and which kernel it is about."""
    return {"at": ", ".join([direction, title(batch), *words]), "kernel": kernel_of(batch, direction)}


def compare_forward(library: Library, batch: Batch, seed: int, dtype: torch.dtype, **how: int) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    right, _ = reference(batch, tensors, dtype)
    yield at(batch, "forward")
    ours = Runner(library, batch, tensors).forward(**how)
    inputs = Inputs(batch, tensors, segment=how.get("segment", 0), folder=library.given)
    yield from rows_of(inputs, FORWARD, ours, right, against(dtype))


def compare_backward(library: Library, batch: Batch, seed: int, dtype: torch.dtype) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    right, delta = reference(batch, tensors, dtype)
    yield at(batch, "backward")
    runner, inputs = Runner(library, batch, tensors), Inputs(batch, tensors, right.lse, delta, folder=library.given)
    ours = runner.backward(right.lse, delta)
    rows = rows_of(inputs, BACKWARD, ours, right, against(dtype))
    yield from rows
    # Where the sums of dQ are wrong, the kernel that ends them is not judged.
    if all(it["passed"] for it in rows):
        yield at(batch, "backward", IN_BF16) | {"kernel": FINISH}
        narrow = runner.backward(right.lse, delta, dq=torch.bfloat16)
        yield from rows_of(inputs, ("dQ",), narrow, right, IN_BF16, against(dtype), kernel=FINISH)
        yield from equal(IN_BF16, inputs, replace(ours, dq=ours.dq.to(torch.bfloat16)), narrow, ("dQ",), FINISH)


def equal(
    what: str, inputs: Inputs, first: Results, second: Results, names: tuple[str, ...], kernel: str = ""
) -> Iterator[dict]:
    """Rows of bits; `second` should have those of `first`."""
    a, b = parts(first), parts(second)
    for name in names:
        differ = (elements.bits(a[name]) != elements.bits(b[name])).sum().item()
        row = {"check": title(inputs.batch, what), "what": f"bits of {name}", "error": differ, "passed": differ == 0}
        row["kernel"] = kernel or kernel_of(inputs.batch, "forward" if inputs.lse is None else "backward")
        if differ:
            row["wrong"] = elements.wrong(inputs, name, b[name], a[name], None)
        yield row


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


def forward_bits(library: Library, batch: Batch, seed: int, runs: int) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    runner, inputs = Runner(library, batch, tensors), Inputs(batch, tensors, folder=library.given)
    yield at(batch, "forward")
    first = runner.forward()
    yield from repeated(inputs, first, runner.forward, runs, FORWARD)
    yield at(batch, "forward", "other cuts")
    again = Runner(library, cut(batch, 90), tensors).forward()
    yield from equal("other cuts of the rows", inputs, first, again, FORWARD)
    yield at(batch, "forward", "two blocks")
    yield from equal("two blocks", inputs, first, runner.forward(blocks=2), FORWARD)


def backward_bits(library: Library, batch: Batch, seed: int, runs: int) -> Iterator[dict]:
    tensors = Tensors.random(batch, library.device, seed)
    right, delta = reference(batch, tensors, torch.float32)
    runner, inputs = Runner(library, batch, tensors), Inputs(batch, tensors, right.lse, delta, folder=library.given)
    yield at(batch, "backward")
    first = runner.backward(right.lse, delta)
    yield from repeated(inputs, first, lambda: runner.backward(right.lse, delta), runs, BACKWARD)
    yield at(batch, "backward", "other cuts")
    again = Runner(library, cut(batch, 90), tensors).backward(right.lse, delta)
    yield from equal("other cuts of the rows", inputs, first, again, ("dQ",))
    yield at(batch, "backward", "three launches of two blocks")
    again = runner.backward(right.lse, delta, launches=3, blocks=2)
    yield from equal("three launches of two blocks", inputs, first, again, BACKWARD)
    yield at(batch, "backward", "dQ in order of arrival")
    again = runner.backward(right.lse, delta, fixed=False)
    yield from equal("dQ in order of arrival", inputs, first, again, ("dK", "dV"))
    off = error(again.dq, first.dq)
    row = {"check": title(batch, "dQ in order of arrival"), "what": "dQ", "error": off, "passed": off <= 1e-5}
    row["kernel"] = kernel_of(batch, "backward")
    if not row["passed"]:
        row["wrong"] = elements.wrong(inputs, "dQ", again.dq, first.dq, 1e-5)
    yield row


def repeated(
    inputs: Inputs, first: Results, call: Callable[[], Results], runs: int, names: tuple[str, ...]
) -> Iterator[dict]:
    """Rows of the last run, and of those before it that differ."""
    for index in range(1, runs):
        rows = list(equal(f"run {index + 1} of {runs}", inputs, first, call(), names))
        if index == runs - 1 or not all(it["passed"] for it in rows):
            yield from rows


def sinks(library: Library, batch: Batch, seed: int) -> Iterator[dict]:
    """O and LSE with a number a head that is a key without a value."""
    tensors = Tensors.random(batch, library.device, seed)
    right, _ = reference(batch, tensors, torch.float64)
    numbers = torch.linspace(-3, 8, batch.heads.query, device=library.device)
    yield at(batch, "forward", "sinks") | {"kernel": "cadre_sink"}
    runner = Runner(library, batch, tensors)
    ours = runner.forward()
    runner.plan(Forward).sink(numbers, ours.out, ours.lse)
    library.wait()
    right.out *= torch.exp(right.lse - torch.logaddexp(right.lse, numbers.double()))[:, :, None]
    right.lse = torch.logaddexp(right.lse, numbers.double())
    inputs = Inputs(batch, tensors, sinks=numbers.tolist(), folder=library.given)
    yield from rows_of(inputs, FORWARD, ours, right, "sinks", against(torch.float64), kernel="cadre_sink")


def units(
    library: Library, dim: int, what: str, seed: int, tiny: bool
) -> Iterator[tuple[str, Callable[[], Iterator[dict]]]]:
    """Names and rows of a part's units; `tiny` where the GPU is emulated."""
    groups = [Heads(2, 2, dim)] if tiny else [Heads(2, 2, dim), Heads(8, 2, dim), Heads(8, 1, dim)]
    middle = medium(Heads(8, 2, dim))
    caps = (2.0, 50.0)  # one that bends every score, and one as models use it
    f64, f32 = torch.float64, torch.float32

    def unit(call: Callable[..., Iterator[dict]], batch: Batch, add: int, *rest: object, **how: int):
        return f"{call.__name__.replace('_', ' ')}, {title(batch)}", lambda: call(
            library, batch, seed + add, *rest, **how
        )

    compare = compare_backward if "backward" in what else compare_forward
    if what in ("forward", "backward"):
        for heads in groups:
            yield unit(compare, small(heads), dim + heads.query, f64)
        if not tiny:
            yield unit(compare, middle, dim, f64)
            yield unit(compare, large(Heads(4, 1, dim)), dim, f32)
        if not tiny and what == "forward":
            batch = Batch("segments of 256 keys", Heads(4, 2, dim))  # so that parts are merged
            batch.document(1500, [(0, 1500)])
            yield unit(compare, batch, 0, f64, segment=256)
    elif what in ("softcap forward", "softcap backward"):
        for heads in groups:
            for cap in caps:
                yield unit(compare, replace(small(heads), softcap=cap), dim + heads.query, f64)
        if not tiny:
            yield unit(compare, replace(middle, softcap=30.0), dim, f64)
    elif what == "sinks and bits":
        for heads in groups:
            yield unit(sinks, small(heads), dim + heads.query)
        for call in (forward_bits, backward_bits):
            yield unit(call, small(groups[-1]), dim, 2 if tiny else 10)
            if not tiny:
                yield unit(call, middle, 1, 10)
                yield unit(call, replace(middle, softcap=30.0), 2, 3)
    else:
        raise ValueError(f"no part is called {what!r}; see run.py for those that there are")
