"""Speed of the GPU kernels beside their peers, in one run, by turns.

In: batches. Out: rows of a report: seconds (median), spread (between the quarters), TFLOP/s by the pairs that masks
keep (4·dim a pair and head forward, 10·dim backward), share of the matrix product measured in the same run, ratio to
the best peer of the same promise. Each is measured twice: warm, several runs between two events; cold, single runs
behind a write of more than the L2. The host puts all of them on the stream while a kernel that only waits holds it,
so none of its work is between the events: where it was slower than that, the row says so. The backward time of peers
includes Δ = rowsum(dO∘O), Cadre's takes it as an input, as its contract says; the time of dQ's scaling is in it. A
peer whose O or gradients are not Cadre's is left out, and said.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import causes
import torch
import torch.nn.functional as F
from cases import Batch, Results, Tensors
from correctness import FLOOR, TILE, error
from ours import Backward, Forward, Library, kept_pairs
from peers import Peer, candidates

# Seconds of all runs of one kernel, runs at least and at most.
TOGETHER, LEAST, MOST = 0.2, 3, 30
# Turns of warm runs; each is TOGETHER / TURNS long.
TURNS = 5
SOFTCAP = "Cadre softcap"
# Largest error of a peer's O and gradients, relative, by head; TILE times as much over TILE_ROWS rows.
SAME, TILE_ROWS = 2e-2, 64
# More than the L2 of a Hopper GPU.
FLUSH_BYTES = 128 << 20
# Clocks of the kernel that holds the stream while the host puts one run on it: a few hundred microseconds.
HELD_CLOCKS = 500_000


class Clock:
    """Times of calls that put work on the current stream."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(self, call: Callable[[], None], runs: int, cold: bool) -> tuple[list[float], bool]:
        """Of runs, and whether the host put all of them on the stream before the first began."""
        pairs = []
        torch.cuda.synchronize()
        held = torch.cuda.Event()
        # As long as the host may take for this.
        torch.cuda._sleep(HELD_CLOCKS * runs)
        held.record()
        if cold:
            for _ in range(runs):
                self.flush.fill_(1)
                pairs.append(self.events())
                pairs[-1][0].record()
                call()
                pairs[-1][1].record()
        else:
            pairs.append(self.events())
            pairs[0][0].record()
            for _ in range(runs):
                call()
            pairs[0][1].record()
        in_time = not held.query()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / (1 if cold else runs) for a, b in pairs], in_time

    @staticmethod
    def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def by_turns(self, calls: dict[str, Callable[[], None]], cold: bool) -> dict[str, Times]:
        """Each once unmeasured, then all by turns."""
        times = {name: Times([], True) for name in calls}
        first = {}
        for name, call in calls.items():
            call()
            first[name] = self.seconds(call, 1, False)[0][0]
        # As often for all, by the slowest.
        runs = max(LEAST, min(MOST, int(TOGETHER / max(first.values()))))
        each = max(1, runs // TURNS)
        for _ in range(max(LEAST, runs // each)):
            for name, call in calls.items():
                found, in_time = self.seconds(call, each, cold)
                times[name].seconds.extend(found)
                times[name].without_host &= in_time
        return times


@dataclass
class Times:
    seconds: list[float]
    without_host: bool


def by_turns(calls: dict[str, Callable[[], None]]) -> dict[str, Times]:
    """Warm."""
    return Clock().by_turns(calls, False)


def quarters(times: list[float]) -> float:
    """Between the first and the third quarter."""
    ordered = sorted(times)
    return ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]


def matmul_peak() -> float:
    """TFLOP/s of a bf16 product of 8192³ on random numbers, median."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    times = by_turns({"product": lambda: torch.mm(a, b, out=out)})["product"]
    return 2 * 8192**3 / statistics.median(times.seconds) / 1e12


def report(batch: Batch, direction: str, name: str, l2: str, times: Times, operations: float, peak: float) -> dict:
    median = statistics.median(times.seconds)
    rate = operations / median / 1e12
    return {
        "case": f"{batch.heads}, {batch.name}",
        "direction": direction,
        "kernel": name,
        "l2": l2,
        "seconds": median,
        "spread": quarters(times.seconds) / median,
        "turns": len(times.seconds),
        "without_host": times.without_host,
        "tflops": rate,
        "share_of_matmul": rate / peak,
    }


def add_ratios(rows: list[dict]) -> None:
    """`ratio` above 1: Cadre is faster than the best peer; fixed order is compared with both kinds of peers. A ratio
    that is nearer to 1 than its spread decides nothing.

    Softcap is compared with Cadre's kernels without: `times_plain`, what it costs.
    """
    plain = {(it["direction"], it["l2"]): it["seconds"] for it in rows if it["kernel"] == "Cadre"}
    for row in rows:
        if not row["kernel"].startswith("Cadre"):
            continue
        if row["kernel"] == SOFTCAP:
            row["times_plain"] = row["seconds"] / plain[row["direction"], row["l2"]]
            continue
        same = [it for it in rows if (it["direction"], it["l2"]) == (row["direction"], row["l2"])]
        theirs = [it for it in same if not it["kernel"].startswith("Cadre")]
        fixed = [it for it in theirs if "deterministic" in it["kernel"]]
        free = [it for it in theirs if "deterministic" not in it["kernel"]]
        for field, peers in [("ratio", free), ("ratio_deterministic", fixed)]:
            if peers:
                best = min(peers, key=lambda it: it["seconds"])
                row[field], row[f"{field}_peer"] = best["seconds"] / row["seconds"], best["kernel"]
                row[f"{field}_spread"] = max(best["spread"], row["spread"])


def with_softcap(library: Library, batch: Batch, t: Tensors) -> list[Callable[[], None]]:
    """The same batch, forward and backward, by the kernels with softcap."""
    r, cap = Results.poisoned(batch, library.device), 50.0
    forward = Forward(library, batch.heads, batch.lines, softcap=cap)
    backward = Backward(library, batch.heads, batch.lines, fixed=False, softcap=cap)
    forward.run(t.q, t.k, t.v, r.out, r.lse)
    library.wait()
    # Any Δ takes as long.
    delta = torch.zeros_like(r.lse)
    gradients = (t.q, t.dout, t.k, t.v, r.lse, delta, r.dq, r.dk, r.dv)
    return [lambda: forward.run(t.q, t.k, t.v, r.out, r.lse), lambda: backward.run(*gradients)]


def gradients_off(ours: Results, theirs: tuple[torch.Tensor, ...]) -> str:
    """What is off most, a head after the other: they are large; nothing where all are near."""
    for what, a, b in zip(("dQ", "dK", "dV"), (ours.dq, ours.dk, ours.dv), theirs):
        for head in range(a.shape[1]):
            one, other = a[:, head].float(), b[:, head].float()
            if not (off := error(one, other)) <= SAME:
                return f"{what} is off by {off:.1e} in head {head}"
            tiles = [
                F.pad(it.square().mean(1), (0, -len(it) % TILE_ROWS)).view(-1, TILE_ROWS).mean(1)
                for it in (one - other, other)
            ]
            off_of = (tiles[0] / tiles[1].maximum(tiles[1].mean() * FLOOR**2).clamp_min(1e-30)).sqrt()
            if not (off := off_of.max().item()) <= TILE * SAME:
                return f"{what} is off by {off:.1e} in rows from {int(off_of.argmax()) * TILE_ROWS} of head {head}"
    return ""


def working_peers(batch: Batch, tensors: Tensors, ours: Results, found: list[Peer]) -> Iterator[dict]:
    """Puts into `found` those that run here and whose O and gradients are `ours`; yields what else there is to say."""
    others: dict[str, float] = {}
    gradients: dict[str, str] = {}
    # Named once: the garbage of one peer must not be the other's shortage.
    for name, make in candidates(batch):
        yield {"at": f"{batch.heads}, {batch.name}, first run of {name}", "peers": True}
        try:
            peer = make(batch, tensors)
            peer.forward()
            peer.backward()
            torch.cuda.synchronize()
        except Exception as why:
            torch.use_deterministic_algorithms(False)
            # A peer that has broken the context raises here, and the process ends.
            torch.cuda.synchronize()
            words = f"{str(why).splitlines()[0][:150]}" if str(why) else type(why).__name__
            yield {"absent": {name: words}} if isinstance(why, ImportError) else {"say": f"no {name}: {words}"}
            continue
        off = error(peer.out(), ours.out)
        if off <= SAME:
            if words := gradients_off(ours, peer.gradients()):
                gradients[name] = words
                yield {"say": f"{name} has other gradients ({words}): left out"}
            else:
                found.append(peer)
        else:
            others[name] = off
            yield {"say": f"{name} computes something else (O is off by {off:.1e}): left out"}
    if others and not found:
        case = f"{batch.heads}, {batch.name}"
        yield {"to": "checks", "row": causes.disagreement(case, f"cadre_forward_{batch.heads.dim}", others)}
    if gradients and not found:
        case, kernel = f"{batch.heads}, {batch.name}", f"cadre_backward_{batch.heads.dim}"
        yield {"to": "checks", "row": causes.other_gradients(case, kernel, gradients)}


def measure(library: Library, batch: Batch, peak: float, with_peers: bool) -> Iterator[dict]:
    """Rows of one batch, and what there is to say."""
    place = f"{batch.heads}, {batch.name}"
    tensors = Tensors.random(batch, library.device, 11)
    results = Results.poisoned(batch, library.device)
    t, r = tensors, results
    yield {"at": f"{place}, plans"}
    begin = time.monotonic()
    forward = Forward(library, batch.heads, batch.lines)
    free = Backward(library, batch.heads, batch.lines, fixed=False)
    fixed = Backward(library, batch.heads, batch.lines, fixed=True)
    plan_seconds = time.monotonic() - begin
    run_forward = lambda: forward.run(t.q, t.k, t.v, r.out, r.lse)  # noqa: E731
    kernels = {it: f"cadre_{it}_{batch.heads.dim}" for it in ("forward", "backward")}
    yield {"at": f"{place}, first run of Cadre forward", "kernel": kernels["forward"]}
    run_forward()
    library.wait()
    delta = torch.empty_like(r.lse)
    for rows in range(0, batch.q_rows, 8192):  # in pieces: the f32 copies are large
        own = slice(rows, rows + 8192)
        delta[own] = (t.dout[own].float() * r.out[own].float()).sum(-1)
    gradients = (t.q, t.dout, t.k, t.v, r.lse, delta, r.dq, r.dk, r.dv)
    forwards = {"Cadre": run_forward}
    backwards = {"Cadre": lambda: free.run(*gradients), "Cadre fixed order": lambda: fixed.run(*gradients)}
    for name, call in backwards.items():
        yield {"at": f"{place}, first run of {name} backward", "kernel": kernels["backward"]}
        call()
        library.wait()
    if batch.softcap_too:
        yield {"at": f"{place}, first run of {SOFTCAP}", "kernel": f"{kernels['backward']}_softcap"}
        forwards[SOFTCAP], backwards[SOFTCAP] = with_softcap(library, batch, tensors)
    peers: list[Peer] = []
    if with_peers:
        yield from working_peers(batch, tensors, r, peers)
    for peer in peers:
        if not peer.fixed_order:
            forwards[peer.name] = peer.forward
        backwards[peer.name] = peer.backward
    pairs = kept_pairs(batch.lines) * batch.heads.query * batch.heads.dim
    rows, clock = [], Clock()
    for direction, calls, operations in [("forward", forwards, 4 * pairs), ("backward", backwards, 10 * pairs)]:
        for cold in (False, True):
            l2 = "cold" if cold else "warm"
            at = f"{place}, {direction} by turns, {l2} L2"
            yield {"at": at, "peers": bool(peers), "kernel": kernels[direction]}
            for name, times in clock.by_turns(calls, cold).items():
                rows.append(report(batch, direction, name, l2, times, operations, peak))
    add_ratios(rows)
    rows[0]["plan_seconds"] = plan_seconds
    yield from rows
