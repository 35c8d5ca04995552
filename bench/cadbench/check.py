"""The checker: whether a plan computes what a case asks, and what it costs. It trusts nothing that a plan says.

In: a case and a plan (README.md has both formats). Out: `Score`, or `RefusedError` that names the task and the fault.

A plan is right if every row of every KV head of every document is computed exactly once, with exactly the keys of its
mask, at a slot that is there. Scores are counted here from rows and keys alone.
"""

from dataclasses import dataclass

Interval = tuple[int, int]


class RefusedError(Exception):
    """A plan that does not compute what its case asks."""


@dataclass(frozen=True)
class Score:
    """What a plan costs. Bytes and seconds are of one layer, all lanes of a slot together but for links."""

    # Load of the busiest slot over the mean, at the slots' weights.
    max_over_mean: float
    # Bytes of Q, K and V that travel forward.
    moved: int
    # Milliseconds of the busiest link, the busiest forward and the busiest backward together.
    link_ms: float
    # Bytes of the slot that needs most, in the larger of a forward and a backward phase.
    memory: int
    tasks: int


def pairs_before(mask: str, rows: int, row: int) -> int:
    """(Query, key) pairs that a mask keeps for the rows before `row` of a document of `rows` rows."""
    if mask == "causal":
        return row * (row + 1) // 2
    if mask == "full":
        return row * rows
    width = window(mask)
    short = min(row, width)
    return short * (short + 1) // 2 + (row - short) * width


def keys_of(mask: str, rows: int, q: Interval) -> Interval:
    """The keys that a mask keeps for some rows."""
    if mask == "full":
        return (0, rows)
    return (0 if mask == "causal" else max(0, q[0] - window(mask) + 1), q[1])


def window(mask: str) -> int:
    name, _, width = mask.partition(":")
    if name != "window" or not width.isdigit() or int(width) == 0:
        raise RefusedError(f"the case has mask {mask!r}; masks are causal, full and window:ROWS")
    return int(width)


def interval(task: dict, field: str, at: int, most: int) -> Interval:
    """A range `[start, end)` of a task, not empty and within its limits."""
    value = task.get(field)
    match value:
        case [int(start), int(end)] if type(start) is int and type(end) is int and 0 <= start < end <= most:
            return (start, end)
    raise RefusedError(f"task {at}: {field} is {value!r}; give [start, end) within 0 and {most}, not empty")


def union(ranges: list[Interval]) -> list[Interval]:
    """Ranges merged where they touch or overlap, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def number(task: dict, field: str, at: int, end: int) -> int:
    value = task.get(field)
    if type(value) is not int or not 0 <= value < end:
        raise RefusedError(f"task {at}: {field} is {value!r}; there are {end}")
    return value


def whole(case: dict) -> None:
    """Refuses a case that cannot be: rows at no rank or at two, places that are not there."""
    try:
        heads, ranks = case["heads"], len(case["ranks"])
        held: dict[int, list[Interval]] = {}
        for stretches in case["ranks"]:
            for it in stretches:
                start, end = it["rows"]
                held.setdefault(it["doc"], []).append((start, end))
        rows = [it["rows"] for it in case["documents"]]
        slots = [(it["weight"], it["home"]) for it in case["slots"]]
        query, kv, lanes, rates = heads["query"], heads["kv"], case["lanes"], case["rates"]
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"the case is not as README.md says: {error!r}") from error
    for document, count in enumerate(rows):
        end = 0
        for start, stop in sorted(held.pop(document, [])):
            if start != end or stop <= start:
                raise RefusedError(f"the case: row {min(start, end)} of document {document} is at no rank, or at two")
            end = stop
        if end != count:
            raise RefusedError(f"the case: row {end} of document {document} is at no rank, or it has {count} rows")
    if held or not rows:
        raise RefusedError(f"the case has {len(rows)} documents, and ranks have rows of {sorted(held)}")
    for slot, (weight, home) in enumerate(slots):
        if weight < 0 or not (home is None or (type(home) is int and 0 <= home < ranks)):
            raise RefusedError(f"the case: slot {slot} has weight {weight} and home {home}; there are {ranks} ranks")
    if all(weight == 0 for weight, _ in slots):
        raise RefusedError("the case: no slot has a weight")
    if min(query, kv, lanes) < 1 or query % kv:
        raise RefusedError(f"the case has {query} query heads, {kv} KV heads, {lanes} lanes")
    places = ranks + sum(home is None for _, home in slots)
    if rates and (len(rates) != places or min(rates) <= 0):
        raise RefusedError(f"the case has {len(rates)} rates for {places} places; each is above 0")


# By slot and document, by KV head: query rows.
Held = dict[tuple[int, int], dict[int, list[Interval]]]


def read(case: dict, plan: dict) -> Held:
    """Who computes which rows, after every task was looked at."""
    documents, slots, kv = case["documents"], case["slots"], case["heads"]["kv"]
    tasks = plan.get("tasks") if isinstance(plan, dict) else None
    if not isinstance(tasks, list):
        raise RefusedError("the plan has no list of tasks")
    held: Held = {}
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for at, task in enumerate(tasks):
        if not isinstance(task, dict):
            raise RefusedError(f"task {at} is no object")
        document = number(task, "doc", at, len(documents))
        slot = number(task, "slot", at, len(slots))
        rows, mask = documents[document]["rows"], documents[document]["mask"]
        q, k = interval(task, "q", at, rows), interval(task, "k", at, rows)
        heads = interval(task, "kv_heads", at, kv)
        if case["lanes"] > 1 and heads != (0, kv):
            raise RefusedError(
                f"task {at}: kv_heads is {list(heads)}; with {case['lanes']} lanes all heads move together"
            )
        if k != keys_of(mask, rows, q):
            raise RefusedError(f"task {at}: k is {list(k)}; rows {list(q)} keep keys {list(keys_of(mask, rows, q))}")
        if slots[slot]["weight"] == 0:
            raise RefusedError(f"task {at}: slot {slot} is out")
        for head in range(*heads):
            held.setdefault((slot, document), {}).setdefault(head, []).append(q)
            seen.setdefault((document, head), []).append((*q, at))
    for document, it in enumerate(documents):
        for head in range(kv):
            end = 0
            for start, stop, at in sorted(seen.get((document, head), [])):
                if start < end:
                    raise RefusedError(
                        f"task {at}: rows {start}.. of document {document}, KV head {head} are computed twice"
                    )
                if start > end:
                    break
                end = stop
            if end < it["rows"]:
                raise RefusedError(f"row {end} of document {document}, KV head {head} is computed nowhere")
    return held


class Places:
    """Where rows lie: ranks first, then dedicated slots."""

    def __init__(self, case: dict) -> None:
        self.of_document: dict[int, list[tuple[int, int, int]]] = {}
        for rank, stretches in enumerate(case["ranks"]):
            for it in stretches:
                self.of_document.setdefault(it["doc"], []).append((*it["rows"], rank))
        self.of_slot = []
        self.count = len(case["ranks"])
        for slot in case["slots"]:
            if slot["home"] is None:
                self.of_slot.append(self.count)
                self.count += 1
            else:
                self.of_slot.append(slot["home"])

    def away(self, document: int, ranges: list[Interval], place: int) -> dict[int, int]:
        """By rank, rows of ranges that lie elsewhere."""
        found: dict[int, int] = {}
        for low, high, rank in self.of_document[document]:
            if rank != place:
                rows = sum(max(0, min(high, end) - max(low, start)) for start, end in ranges)
                if rows:
                    found[rank] = found.get(rank, 0) + rows
        return found


def score(case: dict, plan: dict) -> Score:
    """Checks a plan and counts what it costs."""
    held = read(case, plan)
    heads, element, documents = case["heads"], case["element_bytes"], case["documents"]
    group, dim = heads["query"] // heads["kv"], heads["dim"]
    query, key, statistic = group * dim * element, 2 * dim * element, 4 * group
    places = Places(case)
    loads = [0] * len(case["slots"])
    memory = [[0, 0] for _ in case["slots"]]
    # Forward and backward, by place: bytes out and in.
    flows = [[[0, 0] for _ in range(places.count)] for _ in range(2)]
    moved = 0
    for (slot, document), by_head in held.items():
        rows, mask = documents[document]["rows"], documents[document]["mask"]
        alike: dict[tuple[Interval, ...], int] = {}
        for ranges in by_head.values():
            alike[tuple(union(ranges))] = alike.get(tuple(union(ranges)), 0) + 1
        there = places.of_slot[slot]
        for ranges, count in alike.items():
            keys = union([keys_of(mask, rows, it) for it in ranges])
            q_rows, k_rows = (sum(end - start for start, end in it) for it in (ranges, keys))
            pairs = sum(pairs_before(mask, rows, end) - pairs_before(mask, rows, start) for start, end in ranges)
            loads[slot] += pairs * group * count
            memory[slot][0] += count * (k_rows * key + q_rows * (2 * query + statistic))
            memory[slot][1] += count * (k_rows * (key + 8 * dim) + q_rows * (3 * query + 2 * statistic))
            for rank, number in places.away(document, list(ranges), there).items():
                moved += number * count * query
                travel(flows[0], rank, there, number * count * query, number * count * (query + statistic))
                travel(flows[1], rank, there, number * count * 2 * (query + statistic), number * count * query)
            for rank, number in places.away(document, keys, there).items():
                moved += number * count * key
                travel(flows[0], rank, there, number * count * key, 0)
                travel(flows[1], rank, there, number * count * key, number * count * 8 * dim)
    weights = [it["weight"] for it in case["slots"]]
    mean = sum(loads) / sum(weights)
    most = max(load / weight for load, weight in zip(loads, weights, strict=True) if weight)
    rates = case["rates"] or [50_000_000_000] * places.count
    busiest = [max(max(both) / rate / case["lanes"] for both, rate in zip(flow, rates, strict=True)) for flow in flows]
    return Score(most / mean, moved, sum(busiest) * 1e3, max(max(it) for it in memory), len(plan["tasks"]))


def travel(flow: list[list[int]], rank: int, there: int, inputs: int, results: int) -> None:
    """Inputs leave the rank and arrive at a slot's place, results come back."""
    flow[rank][0] += inputs
    flow[there][1] += inputs
    flow[there][0] += results
    flow[rank][1] += results
