"""Cases: what a planner is asked.

In: sets of lengths. Out: cases, plain JSON objects; README.md has the format. A case says everything that a planner may
know, and the checker believes nothing else.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import lengths
from lengths import K, Lengths

HEADS = {"query": 32, "kv": 8, "dim": 128}
# Of a link each way, bytes a second: 400 Gbit/s.
RATE = 50_000_000_000


def end_to_end(rows: list[int], rank_rows: int) -> list[list[dict]]:
    """One document after the other, cut at the edges of ranks."""
    ranks: list[list[dict]] = [[]]
    room = rank_rows
    for document, length in enumerate(rows):
        start = 0
        while start < length:
            if room == 0:
                ranks.append([])
                room = rank_rows
            end = min(length, start + room)
            ranks[-1].append({"doc": document, "rows": [start, end]})
            room -= end - start
            start = end
    return ranks


def head_tail(rows: list[int], rank_rows: int) -> list[list[dict]]:
    """As end to end, but each rank of a document that spans ranks has as many rows of its head and of its tail."""
    ranks = end_to_end(rows, rank_rows)
    pieces: dict[int, list[int]] = {}
    for rank, stretches in enumerate(ranks):
        for it in stretches:
            pieces.setdefault(it["doc"], []).append(rank)
    for document, places in pieces.items():
        head, tail = 0, rows[document]
        for rank in places if len(places) > 1 else []:
            at = next(at for at, it in enumerate(ranks[rank]) if it["doc"] == document)
            start, end = ranks[rank][at]["rows"]
            count = end - start
            both = [[head, head + count // 2], [tail - (count - count // 2), tail]]
            head, tail = both[0][1], both[1][0]
            ranks[rank][at : at + 1] = [{"doc": document, "rows": it} for it in both if it[0] < it[1]]
    return ranks


def case(of: Lengths, *, layout: str = "end-to-end", mask: str = "causal", slots: int = 0, lanes: int = 8) -> dict:
    """A case of `slots` dedicated servers; with 0 each rank has one in place."""
    lay = {"end-to-end": end_to_end, "head-tail": head_tail}[layout]
    homes = [None] * slots if slots else list(range(of.ranks))
    pool = f"{slots} dedicated" if slots else "in place"
    return {
        "name": f"{of.name}, {layout}, {mask}, {pool}, {lanes} lanes",
        "layout": layout,
        "rank_rows": of.rank_rows,
        "documents": [{"rows": rows, "mask": mask} for rows in of.documents],
        "ranks": lay(of.documents, of.rank_rows),
        "slots": [{"home": home, "weight": 100} for home in homes],
        "heads": HEADS,
        "element_bytes": 2,
        "lanes": lanes,
        "rates": [],
    }


def slow_links(it: dict, seed: int) -> dict:
    """One place in eight has a link of a quarter of the rate."""
    dice = random.Random(seed)
    places = len(it["ranks"]) + sum(slot["home"] is None for slot in it["slots"])
    rates = [RATE // 4 if dice.random() < 1 / 8 else RATE for _ in range(places)]
    return it | {"name": f"{it['name']}, slow links", "rates": rates}


def outages(seed: int, servers: int, days: float) -> list[tuple[float, float, int]]:
    """(begin, end, server) in days, with the published statistics of InfiniteHBD's trace: 584 faults of 400 servers
    in 349 days, half of them over after 0.85 days and nine of ten after 13.7. The distributions are the simplest with
    these numbers: exponential between faults, log-normal for outages."""
    dice = random.Random(seed)
    rate = 584 / 400 / 349 * servers
    # 1.2816 standard deviations lie between the median and the ninetieth percentile.
    sigma = 2.1686
    found, now = [], dice.expovariate(rate)
    while now < days:
        found.append((now, now + 0.85 * 2.718281828 ** dice.gauss(0, sigma), dice.randrange(servers)))
        now += dice.expovariate(rate)
    return found


def worst_day(seed: int, servers: int, days: int) -> list[int]:
    """Servers that are out on the day of a trace on which most are."""
    trace = outages(seed, servers, days)
    of_day = [{server for begin, end, server in trace if begin < day + 1 and end > day} for day in range(days)]
    return sorted(max(of_day, key=len))


def without(it: dict, out: list[int]) -> dict:
    """The same pool while some slots are out: their weight is 0, nothing may be planned for them."""
    slots = [slot | {"weight": 0} if at in out else slot for at, slot in enumerate(it["slots"])]
    return it | {"name": f"{it['name']}, {len(out)} out", "slots": slots}


def cases(seed: int, folder: Path | None) -> Iterator[dict]:
    """All cases of a seed, and those of recorded workloads if there is a folder of them."""
    public = [lengths.longmino(seed, 128 * K, 32), lengths.heavy_tail(seed, 64 * K, 16)]
    for of in public:
        for lanes in (8, 1):
            yield case(of, lanes=lanes)
            yield case(of, lanes=lanes, layout="head-tail")
            yield case(of, lanes=lanes, slots=of.ranks)
    for mask in ("full", "window:4096"):
        yield case(public[1], mask=mask)
        yield case(public[1], mask=mask, slots=12, lanes=1)
    for of in lengths.adversarial(seed):
        yield case(of)
        yield case(of, slots=of.ranks // 2 + 1, lanes=1)
    for of in public:
        yield slow_links(case(of), seed)
        yield without(case(of, slots=64), worst_day(seed, 64, 349))
    if folder:
        for of in lengths.recorded(folder):
            for lanes in (8, 1):
                yield case(of, layout="head-tail", lanes=lanes)
