"""Copies of rows in one launch: whether every byte arrives, and how fast, beside the device's memcpy.

In: the library, a seed. Out: rows of a report. What the lists do not name keeps its poison. The rate is of bytes that
arrive, by the GPU's clock, with the copy of the list; the memcpy of as many bytes is one contiguous piece.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import torch
from ours import Library, RowLine, Rows

POISON = 0xAB


def drawn(seed: int, word: int, size: int) -> list[RowLine]:
    """Copies one behind the other in a target of `size` bytes, with gaps, from anywhere in a source of as many."""
    draw, lines, to = random.Random(seed), [], 0
    while True:
        kind = draw.choice(["one row", "long rows", "rows"])
        count = word * draw.randint(1, 9000 if kind == "long rows" else 64)
        rows = 1 if kind == "one row" else draw.randint(2, 3 if kind == "long rows" else 500)
        from_stride, to_stride = (count + word * draw.randint(0, 40) for _ in range(2))
        if max(to + to_stride * rows, from_stride * rows) > size:
            return lines
        start = draw.randint(0, (size - from_stride * rows) // word) * word
        lines.append(RowLine(start, to, rows, count, from_stride, to_stride))
        to += to_stride * rows + word * draw.randint(0, 3)


def expect(source: torch.Tensor, target: torch.Tensor, lines: list[RowLine]) -> None:
    for it in lines:
        shape = (it.rows, it.bytes)
        rows = torch.as_strided(source, shape, (it.from_stride, 1), it.from_)
        torch.as_strided(target, shape, (it.to_stride, 1), it.to).copy_(rows)


def check(library: Library, seed: int, tiny: bool) -> Iterator[dict]:
    size = 1 << (19 if tiny else 24)
    rows = Rows(library)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    source = source.to(library.device)
    for index in range(4 if tiny else 20):
        word = (16, 4)[index % 2]
        lines = drawn(seed + index, word, size)
        ours, right = (torch.full_like(source, POISON) for _ in range(2))
        expect(source, right, lines)
        if library.device.type == "cuda":
            torch.cuda.synchronize()
        name = f"{len(lines)} copies of words of {word} bytes"
        kernel = f"cadre_copy_rows_{word}"
        yield {"at": name, "kernel": kernel}
        rows.copy(source, ours, (RowLine * len(lines))(*lines))
        library.wait()
        wrong = (ours != right).sum().item()
        row = {"check": name, "what": "bytes of copied rows", "error": wrong, "passed": wrong == 0, "kernel": kernel}
        if wrong:
            at = int((ours != right).nonzero()[0])
            copy = next((it for it in lines if it.to <= at < it.to + it.to_stride * it.rows), None)
            said = {name: getattr(copy, name) for name, _ in RowLine._fields_} if copy else "of no copy"
            first = {"first": f"byte {at}", "ours": str(ours[at].item()), "right": str(right[at].item())}
            row["wrong"] = first | {"count": f"{wrong} of {size}", "tile": f"copy {said}"}
        yield row


def cases(size: int) -> Iterator[tuple[str, list[RowLine]]]:
    """As pulls are: rows of some heads out of rows of all, whole rows, and pieces at no even distance."""
    yield "one piece", [RowLine(0, 0, 1, size, 0, 0)]
    for width, whole in [(256, 2048), (1024, 4096)]:
        count = size // width
        yield f"rows of {width} bytes out of {whole}", [RowLine(0, 0, count, width, whole, width)]
        yield f"rows of {width} bytes into {whole}", [RowLine(0, 0, count, width, width, whole)]
    draw, count = random.Random(3), 2048
    piece = size // count
    places = [draw.randrange(0, size // 16) * 16 for _ in range(count)]
    yield f"{count} pieces of {piece} bytes", [RowLine(it, n * piece, 1, piece, 0, 0) for n, it in enumerate(places)]


def measure(library: Library) -> Iterator[dict]:
    from speed import by_turns, quarters

    size = 64 << 20
    rows = Rows(library)
    source, target = (torch.zeros(size * 8, dtype=torch.uint8, device=library.device) for _ in range(2))
    for name, lines in cases(size):
        yield {"at": name}
        table = (RowLine * len(lines))(*lines)
        calls = {
            "ours": lambda table=table: rows.copy(source, target, table),
            "memcpy": lambda: target[:size].copy_(source[:size]),
        }
        times = by_turns(calls)
        ours, theirs = (statistics.median(times[it].seconds) for it in ("ours", "memcpy"))
        yield {
            "case": name,
            "seconds": ours,
            "spread": quarters(times["ours"].seconds) / ours,
            "without_host": times["ours"].without_host,
            "gigabytes": size / ours / 1e9,
            "ratio": theirs / ours,
        }
