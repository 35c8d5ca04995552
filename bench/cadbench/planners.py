"""Planners to compare with: the published one, rebuilt, a plain construct, and any program.

In: a case. Out: a plan, or `NoPlanError` with the reason. Nothing here is believed by the checker.
"""

import json
import math
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from check import RefusedError, keys_of, pairs_before

TILE = 128
TIMEOUT_S = 600
# Beyond, the rebuilt peer takes minutes: it looks at all pieces for every move.
PUBLISHED_RANKS = 128


class NoPlanError(Exception):
    """A case that a planner is not made for."""


Planner = Callable[[dict], dict]


def task(case: dict, document: int, rows: tuple[int, int], heads: tuple[int, int], slot: int) -> dict:
    whole = case["documents"][document]
    keys = keys_of(whole["mask"], whole["rows"], rows)
    return {"doc": document, "q": list(rows), "k": list(keys), "kv_heads": list(heads), "slot": slot}


def at_home(case: dict) -> dict:
    """Every row at its rank: no planner at all."""
    slot_of = {it["home"]: at for at, it in enumerate(case["slots"]) if it["weight"]}
    if any(rank not in slot_of for rank in range(len(case["ranks"]))):
        raise NoPlanError("a rank has no slot")
    heads = (0, case["heads"]["kv"])
    return {
        "tasks": [
            task(case, it["doc"], tuple(it["rows"]), heads, slot_of[rank])
            for rank, stretches in enumerate(case["ranks"])
            for it in stretches
        ]
    }


def poured(case: dict) -> dict:
    """The construct: all work lies along one line, document after document, KV head after head, row after row, and
    every slot takes its share of it in turn. A document that a rank holds whole stays there if it is little work."""
    heads, slots = case["heads"]["kv"], [at for at, it in enumerate(case["slots"]) if it["weight"]]
    column = 1 if case["lanes"] == 1 else heads
    where: dict[int, set[int]] = {}
    for rank, stretches in enumerate(case["ranks"]):
        for it in stretches:
            where.setdefault(it["doc"], set()).add(rank)
    slot_of = {case["slots"][at]["home"]: at for at in slots if case["slots"][at]["home"] is not None}
    work = [pairs_before(it["mask"], it["rows"], it["rows"]) * heads for it in case["documents"]]
    weights = sum(case["slots"][at]["weight"] for at in slots)
    left = {at: sum(work) * case["slots"][at]["weight"] / weights for at in slots}
    level = sum(work) / len(slots)
    tasks, line = [], []
    for document, it in enumerate(case["documents"]):
        home = slot_of.get(next(iter(where[document]))) if len(where[document]) == 1 else None
        if home is not None and work[document] <= level / 8:
            left[home] -= work[document]
            tasks.append(task(case, document, (0, it["rows"]), (0, heads), home))
        else:
            line.append(document)
    turn = iter(slots)
    slot = next(turn)
    for document in line:
        mask, rows = case["documents"][document]["mask"], case["documents"][document]["rows"]
        for first in range(0, heads, column):
            start = 0
            while start < rows:
                while left[slot] < level / 1000 and slot != slots[-1]:
                    slot = next(turn)
                end = rows
                if slot != slots[-1]:
                    end = cut(mask, rows, start, left[slot] / column)
                left[slot] -= (pairs_before(mask, rows, end) - pairs_before(mask, rows, start)) * column
                tasks.append(task(case, document, (start, end), (first, first + column), slot))
                start = end
    return {"tasks": tasks}


def cut(mask: str, rows: int, start: int, pairs: float) -> int:
    """The tile edge next to where rows from `start` on have so many pairs, at least one tile further."""
    low, high = start // TILE + 1, math.ceil(rows / TILE)
    wanted = pairs_before(mask, rows, start) + pairs
    while low < high:
        middle = (low + high) // 2
        if pairs_before(mask, rows, min(rows, middle * TILE)) < wanted:
            low = middle + 1
        else:
            high = middle
    edges = [min(rows, max(start // TILE + 1, it) * TILE) for it in (low - 1, low)]
    return min(edges, key=lambda it: abs(pairs_before(mask, rows, it) - wanted))


@dataclass
class Piece:
    """Rows of a document at one place: of its head, and of the tail that mirrors it; either may be empty."""

    document: int
    head: tuple[int, int]
    tail: tuple[int, int]

    def pairs(self) -> int:
        return sum((b * (b + 1) - a * (a + 1)) // 2 for a, b in (self.head, self.tail))

    def rows(self) -> int:
        return self.head[1] - self.head[0] + self.tail[1] - self.tail[0]

    def each(self) -> int:
        """Pairs of the innermost row of the head and its mirror together."""
        return self.head[1] + self.tail[0] + 1

    def split(self, pairs: int) -> "Piece | None":
        count = min(pairs // self.each(), self.head[1] - self.head[0], self.tail[1] - self.tail[0])
        if count <= 0:
            return None
        gone = Piece(self.document, (self.head[1] - count, self.head[1]), (self.tail[0], self.tail[0] + count))
        self.head = (self.head[0], self.head[1] - count)
        self.tail = (self.tail[0] + count, self.tail[1])
        return gone


def published(case: dict, tolerance: float = 0.05) -> dict:
    """DistCA's planner, built again from its description: servers below the mean are filled in order of their deficit
    with the piece of the best ratio of work to bytes, whole or as an inner pair of head and tail, until they are within
    the tolerance. `test_cadbench.py` holds it against the records of the original."""
    if [it["home"] for it in case["slots"]] != list(range(len(case["ranks"]))):
        raise NoPlanError("it knows slots in place only")
    if any(it["weight"] != 100 for it in case["slots"]):
        raise NoPlanError("it knows slots of one speed only")
    if len(case["ranks"]) > PUBLISHED_RANKS:
        raise NoPlanError(f"rebuilt here it takes minutes beyond {PUBLISHED_RANKS} ranks")
    if any(it["mask"] != "causal" for it in case["documents"]):
        raise NoPlanError("it knows causal documents only")
    heads, element = case["heads"], case["element_bytes"]
    query, key = element * heads["query"] * heads["dim"], 2 * element * heads["kv"] * heads["dim"]
    pieces = [pieces_of(stretches) for stretches in case["ranks"]]
    loads = [sum(it.pairs() for it in of) for of in pieces]
    mean = sum(loads) // len(loads)
    allowed = int(mean * tolerance)
    receivers = sorted((at for at in range(len(loads)) if loads[at] < mean), key=lambda at: (loads[at] - mean, at))
    for receiver in receivers:
        while loads[receiver] + allowed < mean:
            best = None
            for donor in (at for at in range(len(loads)) if loads[at] > mean):
                limit = min(mean - loads[receiver], loads[donor] - mean)
                for index, piece in enumerate(pieces[donor]):
                    work = piece.pairs()
                    empty = piece.head[0] == piece.head[1] or piece.tail[0] == piece.tail[1]
                    if work > limit and (limit < piece.each() or empty):
                        continue
                    moved = min(work, limit)
                    rows = piece.rows() * moved // max(1, work)
                    cost = rows * query // 2 + case["documents"][piece.document]["rows"] * key
                    if best is None or moved * best[1] > best[0] * cost:
                        best = (moved, cost, donor, index)
            if best is None:
                break
            moved, _, donor, index = best
            piece = pieces[donor][index]
            gone = pieces[donor].pop(index) if piece.pairs() <= moved else piece.split(moved)
            if gone is None:
                break
            loads[donor] -= gone.pairs()
            loads[receiver] += gone.pairs()
            pieces[receiver].append(gone)
    all_heads = (0, heads["kv"])
    return {
        "tasks": [
            task(case, it.document, rows, all_heads, slot)
            for slot, of in enumerate(pieces)
            for it in of
            for rows in (it.head, it.tail)
            if rows[0] < rows[1]
        ]
    }


def pieces_of(stretches: list[dict]) -> list[Piece]:
    """What a rank holds: of a document a head and the tail that mirrors it, or one run of rows cut in its middle."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for it in stretches:
        runs.setdefault(it["doc"], []).append(tuple(it["rows"]))
    pieces = []
    for document, of in sorted(runs.items()):
        match sorted(of):
            case [head, tail]:
                pieces.append(Piece(document, head, tail))
            case others:
                middles = [(start, (start + end) // 2, end) for start, end in others]
                pieces.extend(Piece(document, (a, m), (m, b)) for a, m, b in middles)
    return pieces


def program(command: str) -> Planner:
    """Any program: `{case}` and `{plan}` of the command become files, the first to read, the second to write."""

    def plan(case: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            of, to = Path(folder, "case.json"), Path(folder, "plan.json")
            of.write_text(json.dumps(case))
            words = [it.format(case=of, plan=to) for it in shlex.split(command)]
            run(words)
            try:
                return json.loads(to.read_text())
            except (OSError, ValueError) as error:
                raise RefusedError(f"it wrote no plan: {error}") from error

    return plan


def cadre(binary: Path) -> Planner:
    """`cadre plan --workload`, which takes documents laid end to end or head and tail, slots in place or dedicated."""

    def plan(case: dict) -> dict:
        masks = {it["mask"] for it in case["documents"]}
        alive = [at for at, it in enumerate(case["slots"]) if it["weight"]]
        dedicated = [at for at in alive if case["slots"][at]["home"] is None]
        if len(masks) > 1 or (dedicated and dedicated != alive):
            raise NoPlanError("`cadre plan --workload` takes one mask, and slots all in place or all dedicated")
        if not dedicated and len(alive) < len(case["slots"]):
            raise NoPlanError("`cadre plan --workload` has a slot at every rank")
        heads = case["heads"]
        workload = {
            "name": "case",
            "tokens_per_rank": case["rank_rows"],
            "num_ranks": len(case["ranks"]),
            "ranks": [[it["rows"] for it in case["documents"]]],
            "mask": masks.pop(),
        }
        with tempfile.TemporaryDirectory() as folder:
            of, to = Path(folder, "workload.json"), Path(folder, "plan.json")
            of.write_text(json.dumps(workload))
            weights = ",".join(str(case["slots"][at]["weight"]) for at in alive)
            words = [binary, "plan", "--workload", of, "--out", to, "--layout", case["layout"], "--weights", weights]
            words += ["--lanes", case["lanes"], "--heads", heads["query"], "--head-dim", heads["dim"]]
            words += ["--hidden-q", heads["query"] * heads["dim"], "--hidden-kv", heads["kv"] * heads["dim"]]
            run([str(it) for it in words + (["--slots", len(alive)] if dedicated else [])])
            made = json.loads(to.read_text())
        if made["ranks"] != case["ranks"]:
            raise NoPlanError("`cadre plan --workload` lays the documents out otherwise")
        for it in made["tasks"]:
            it["slot"] = alive[it["slot"]]
        return made

    return plan


def run(words: list[str]) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPlanError(f"{words[0]}: {error}") from error
    if done.returncode:
        raise NoPlanError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[:200]}")
