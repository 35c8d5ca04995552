"""The batches of the bench, what matters most first, in groups that are measured in one process each.

In: drawn lengths and plans in the folder. Out: `Spec`s, which name their group and make their batch later; so whoever
only wants the groups needs no PyTorch.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases import Batch

HERE = Path(__file__).resolve().parent
EARLY = "early"


@dataclass(frozen=True)
class Spec:
    group: str
    name: str
    make: Callable[[], "Batch"]


def dense(dim: int, rows: int, count: int, causal: bool) -> "Batch":
    import cases

    return cases.dense(heads(dim), rows, count, cases.CAUSAL if causal else cases.FULL)


def heads(dim: int):
    from ours import Heads

    return Heads(16, 2, dim)


def planned(dim: int, name: str, ranks: list[list[int]], slot: int) -> "Batch":
    import cases

    flat = [it for rank in ranks for it in rank]
    return cases.planned(heads(dim), name, HERE / "plans" / f"{name}.json", flat, slot)


def packed(dim: int, name: str, lengths: list[int]) -> "Batch":
    import cases

    return cases.packed(heads(dim), name, lengths)


def short_tasks(dim: int, rows: int, every: int) -> "Batch":
    import cases

    return cases.short_tasks(heads(dim), rows, every)


def specs() -> Iterator[Spec]:
    lengths = {it.stem: json.loads(it.read_text())["ranks"] for it in sorted((HERE / "workloads").glob("*.json"))}
    for rows in (16, 32):
        yield Spec(EARLY, f"causal {rows}K", lambda r=rows: dense(128, r * 1024, 32 // r, True))
    for name, ranks in lengths.items():
        yield Spec(EARLY, f"tasks {name}", lambda n=name, r=ranks: planned(128, n, r, 0))
        yield Spec(EARLY, f"packed {name}", lambda n=name, r=ranks: packed(128, n, r[0]))
    yield Spec(EARLY, "short tasks", lambda: short_tasks(128, 65536, 4))
    yield Spec(EARLY, "as many pairs in one document", lambda: dense(128, 32896, 1, True))
    for dim in (128, 64, 256):
        for mask in ("causal", "full"):
            for rows in (8, 2, 4, 16, 32, 64):
                if dim == 128 and mask == "causal" and rows in (16, 32):
                    continue
                make = lambda d=dim, m=mask, r=rows: dense(d, r * 1024, max(1, 16 // r), m == "causal")  # noqa: E731
                yield Spec(f"d{dim} {mask}", f"{mask} {rows}K", make)
        for name, ranks in lengths.items():
            if dim != 128:
                make = lambda d=dim, n=name, r=ranks: planned(d, n, r, 1)  # noqa: E731
                yield Spec(f"d{dim} tasks", f"tasks {name}", make)


def groups() -> list[str]:
    """In order, the early one first."""
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
