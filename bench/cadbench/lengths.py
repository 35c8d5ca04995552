"""Document lengths: recorded, public, adversarial.

In: a seed, or a folder of recorded workloads. Out: `Lengths`, whose documents fill all ranks exactly. The same seed
gives the same lengths on every machine: numbers come from `random.Random(seed).random()`, which Python does not change.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

K = 1024

# Documents of Dolma 3 Longmino (PDFs) by length in tokens, as published with the data set: (from, to, documents).
LONGMINO = [
    (8 * K, 16 * K, 1_090_349),
    (16 * K, 32 * K, 508_354),
    (32 * K, 64 * K, 142_983),
    (64 * K, 128 * K, 54_992),
    (128 * K, 256 * K, 20_893),
    (256 * K, 512 * K, 8_130),
    (512 * K, 1024 * K, 3_394),
]


@dataclass(frozen=True)
class Lengths:
    """Documents that fill `ranks` ranks of `rank_rows` rows each."""

    name: str
    rank_rows: int
    ranks: int
    documents: list[int]


def filled(name: str, rank_rows: int, ranks: int, draw: Iterator[int]) -> Lengths:
    """Takes documents until all ranks are full; the last one is cut."""
    left = rank_rows * ranks
    documents = []
    while left > 0:
        length = min(next(draw), left)
        documents.append(length)
        left -= length
    return Lengths(name, rank_rows, ranks, documents)


def recorded(folder: Path) -> Iterator[Lengths]:
    """Workload files as `cadre plan --workload` reads them."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} has no workload files (.json)")
    for path in files:
        it = json.loads(path.read_text())
        documents = [rows for one in it["ranks"] for rows in one]
        yield Lengths(it["name"], it["tokens_per_rank"], it["num_ranks"], documents)


def longmino(seed: int, rank_rows: int, ranks: int) -> Lengths:
    """Buckets by their published counts, lengths in a bucket log-uniform, as nothing finer is published."""
    dice = random.Random(seed)
    total = sum(count for _, _, count in LONGMINO)

    def draw() -> Iterator[int]:
        while True:
            at = dice.random() * total
            for low, high, count in LONGMINO:
                if at < count:
                    yield int(low * (high / low) ** (at / count))
                    break
                at -= count

    return filled(f"longmino_{ranks}x{rank_rows // K}K_s{seed}", rank_rows, ranks, draw())


def heavy_tail(seed: int, rank_rows: int, ranks: int) -> Lengths:
    """Many short documents and few long ones that have most of the work."""
    dice = random.Random(seed)

    def draw() -> Iterator[int]:
        while True:
            yield max(64, min(1024 * K, int(200 / (1 - dice.random()) ** 1.25)))

    return filled(f"heavy_tail_{ranks}x{rank_rows // K}K_s{seed}", rank_rows, ranks, draw())


def adversarial(seed: int) -> Iterator[Lengths]:
    """What planners stumble over; the seed moves lengths by a few rows, so that nothing fits by chance."""
    dice = random.Random(seed)

    def near(rows: int) -> int:
        return max(1, rows + int(dice.random() * 255) - 127)

    def always(*lengths: int) -> Iterator[int]:
        yield from lengths
        while True:
            yield lengths[-1]

    def made(name: str, rank_rows: int, ranks: int, draw: Iterator[int]) -> Lengths:
        return filled(f"{name}_s{seed}", rank_rows, ranks, draw)

    yield made("one_giant", 16 * K, 32, always(near(16 * 32 * K)))
    yield made("giant_and_dust", 64 * K, 16, always(near(512 * K), 512))
    yield made("two_giants", 64 * K, 16, always(near(384 * K), near(384 * K), near(4 * K)))
    yield made("all_alike", 64 * K, 16, always(64 * K))
    yield made("a_row_too_long", 16 * K, 16, always(16 * K + 1))
    yield made("below_a_tile", 4 * K, 8, always(100))
    yield made("a_row_beyond_a_tile", 4 * K, 8, always(129))
    yield made("single_rows", K, 8, always(near(4 * K), 1))
    yield made("doubling", 64 * K, 8, iter([2**it for it in range(18)] + [near(9 * K)] * 64))
