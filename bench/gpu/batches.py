"""The batches of the bench, what matters most first, in groups that are measured in one process each.

In: drawn lengths and plans in the folder. Out: `Spec`s, which name their group and make their batch later; so whoever
only wants the groups needs no PyTorch. Heads are those of large models: 64:8, and 32:8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases import Batch

HERE = Path(__file__).resolve().parent
EARLY = "early"
# Query heads; KV heads are 8. With head dim 256 half, so that tensors stay as large.
MANY, FEW = 64, 32
# Pairs of one document that stand for those of a packed batch: rows of a causal document, a multiple of 128.
STEP = 128


@dataclass(frozen=True)
class Spec:
    group: str
    name: str
    make: Callable[[], Batch]


def heads(dim: int, query: int = MANY):
    from ours import Heads

    return Heads(query if dim < 256 else query // 2, 8, dim)


def dense(dim: int, rows: int, count: int, causal: bool, query: int = MANY) -> Batch:
    import cases

    batch = cases.dense(heads(dim, query), rows, count, cases.CAUSAL if causal else cases.FULL)
    batch.softcap_too = (dim, rows, count, query) == (128, 16384, 1, MANY)
    return batch


def planned(dim: int, name: str, ranks: list[list[int]], slot: int) -> Batch:
    import cases

    flat = [it for rank in ranks for it in rank]
    return cases.planned(heads(dim), name, HERE / "plans" / f"{name}.json", flat, slot)


def as_long(make: Callable[[], Batch]) -> Batch:
    """One causal document with as many (query, key) pairs as a batch, hence as much work."""
    import cases
    from ours import kept_pairs

    batch = make()
    pairs = kept_pairs(batch.lines)
    rows = round((2 * pairs) ** 0.5 / STEP) * STEP
    long = cases.dense(batch.heads, rows, 1, cases.CAUSAL)
    long.name = f"one document of the pairs of {batch.name}"
    return long


def packed(dim: int, name: str, lengths: list[int]) -> Batch:
    import cases

    return cases.packed(heads(dim), name, lengths)


def short_tasks(dim: int, rows: int, every: int) -> Batch:
    import cases

    return cases.short_tasks(heads(dim), rows, every)


def specs() -> Iterator[Spec]:
    lengths = {it.stem: json.loads(it.read_text())["ranks"] for it in sorted((HERE / "workloads").glob("*.json"))}
    for rows, query in ((16, MANY), (32, MANY), (16, FEW)):
        make = lambda r=rows, h=query: dense(128, r * 1024, 1, True, h)  # noqa: E731
        yield Spec(EARLY, f"causal {rows}K, {query} heads", make)
    for name, ranks in lengths.items():
        plan = lambda n=name, r=ranks: planned(128, n, r, 0)  # noqa: E731
        yield Spec(EARLY, f"tasks {name}", plan)
        yield Spec(EARLY, f"tasks {name} as one", lambda p=plan: as_long(p))
        yield Spec(EARLY, f"packed {name}", lambda n=name, r=ranks: packed(128, n, r[0]))
    yield Spec(EARLY, "short tasks", lambda: short_tasks(128, 65536, 4))
    yield Spec(EARLY, "as many pairs in one document", lambda: dense(128, 32896, 1, True))
    for dim in (128, 64, 256):
        for mask in ("causal", "full"):
            # Several sizes of batch: one document, and as many as fill 16K rows.
            for rows, count in ((8, 1), (8, 2), (2, 8), (4, 4), (16, 1), (32, 1), (64, 1), (8, 4)):
                if dim == 128 and mask == "causal" and rows in (16, 32):
                    continue
                make = lambda d=dim, m=mask, r=rows, c=count: dense(d, r * 1024, c, m == "causal")  # noqa: E731
                yield Spec(f"d{dim} {mask}", f"{mask} {rows}K x{count}", make)
        for name, ranks in lengths.items():
            if dim != 128:
                make = lambda d=dim, n=name, r=ranks: planned(d, n, r, 1)  # noqa: E731
                yield Spec(f"d{dim} tasks", f"tasks {name}", make)


def groups() -> list[str]:
    """All batches in the order of the bench; the one that runs early comes first."""
    return list(dict.fromkeys(it.group for it in specs()))


def check() -> Iterator[dict]:
    """Without a GPU: peers are given the pairs that Cadre's masks keep."""
    from ours import kept_pairs

    for spec in specs():
        batch = spec.make()
        pairs = 0
        for rows, keys, _, _ in batch.sequences:
            pairs += rows * keys - (rows * (rows - 1) // 2 if batch.causal else 0)
        same = pairs == kept_pairs(batch.lines)
        yield {"check": f"{batch.heads}, {batch.name}", "what": "pairs of peers", "error": 0, "passed": same}
