"""What the times of forms decide: which form of a kernel, which order of dQ, how many processors.

In: a report, with rows of times as cadre-gpu-probe tells them. Out: lines, each with the two times that decide, and by
how much: by the differences of rounds in which both were timed, one behind the other. A difference that is not larger
than any two rounds differ by, or below 1 %, decides nothing and says so; nor do few rounds. (By the quarters of five
rounds alone one of six forms would win by noise.) Times of a form that is wrong, or that was not compared with f64,
decide nothing. Pure.
"""

from __future__ import annotations

import re
import statistics

BUILT = "as built"
# A difference below this share decides nothing.
LEAST = 0.01
# Fewer rounds decide nothing; how many times the spread of runs a difference is that counts without rounds.
ROUNDS, UNPAIRED = 4, 2
# What a form is there to decide, and the order of dQ in which it can differ.
QUESTIONS = {
    "poll": ("turns at dQ are polled relaxed and with pauses, not acquired at once", ("fixed",)),
    "later": ("dQ and dK of head dim 128 a step later, under its exponentials", ("fixed", "arrival")),
    "tall": ("forward of head dim 64 by 192 rows, an eighth of 2^x by multiply-adds", ("",)),
    "panels": ("dQ of head dim 64 by products over whole panels, not half a panel each", ("fixed", "arrival")),
}


def unsound(row: dict, content: dict) -> str:
    """Why a time decides nothing; empty if the form that was timed is known to be right."""
    found = re.search(r" d(\d+),", row["case"])
    dim = found[1] if found else "?"
    names = {f"form {row['form']}, {it} d{dim}" for it in ("forward", "backward")}
    checks = [it for it in content["checks"] if it["check"] in names]
    if not all(it["passed"] for it in checks):
        return f"form {row['form']} of d{dim} is wrong: its times decide nothing"
    # The build's own kernels were compared before, too.
    known = row["form"] == BUILT and content["kernels"].get(f"cadre_{row['direction']}_{dim}") == "right"
    if checks or known:
        return ""
    return f"form {row['form']} of d{dim} was not compared with f64: its times decide nothing"


def told(content: dict) -> list[str]:
    """Times of warm runs; of a case that was measured twice, the last."""
    found: dict[tuple, dict] = {}
    lines: list[str] = []
    for it in content["forms"]:
        if why := unsound(it, content):
            lines += [] if why in lines else [why]
        elif it["l2"] == "warm":
            found[it["case"], it["direction"], it["order"], it["form"], it["blocks"]] = it
    for (case, direction, order, form, blocks), it in found.items():
        most = max(key[4] for key in found if key[0] == case)

        def beside(order: str = order, case: str = case, direction: str = direction, most: int = most) -> dict | None:
            return found.get((case, direction, order, BUILT, most))

        base = beside()
        question, orders = QUESTIONS.get(form, (form, ("fixed", "arrival")))
        if form != BUILT and base and order in orders:
            lines.append(f"{question}: {case}, {direction} {order}: {compared(it, base)}")
        elif form == BUILT and blocks < most and base:
            lines.append(f"{most - blocks} processors fewer: {case}, {direction} {order}: {compared(it, base)}")
        elif form == BUILT and order == "fixed" and (free := beside("arrival")):
            lines.append(f"dQ in one order instead of that of arrival: {case}: {compared(it, free)}")
        elif form == BUILT and direction == "forward":
            lines.append(f"forward: {case}: {it['seconds'] * 1e3:.3f} ms, {it['tflops']:.0f} TFLOP/s")
    return ["decisions between forms (warm L2, medians):", *lines] if lines else []


def compared(it: dict, base: dict) -> str:
    """By the differences of rounds, where both took turns; else by the medians of all runs."""
    ours = it.get("rounds", [])
    theirs = it.get("base_rounds") or (base.get("rounds", []) if it["form"] == base["form"] else [])
    paired = sorted(a / b for a, b in zip(ours, theirs) if a and b)
    if len(paired) > 1:
        times, beside = statistics.median(paired), statistics.median(theirs)
        spread = paired[-1] - paired[0]
        rounds = f" in {len(paired)} rounds"
    else:
        times, beside = it["seconds"] / base["seconds"], base["seconds"]
        spread, rounds = UNPAIRED * max(it["spread"], base["spread"]), ""
    mine = it["seconds"] * 1e3
    words = f"{mine:.3f} ms ({it['tflops']:.0f} TFLOP/s) beside {beside * 1e3:.3f}, {times:.3f} times{rounds}"
    if not (it.get("without_host", True) and base.get("without_host", True)):
        words += ", with the host's work between runs"
    if 1 < len(paired) < ROUNDS:
        return f"{words}: undecided, too few"
    if abs(times - 1) <= spread:
        return f"{words}: undecided, the spread is {spread:.1%}"
    if abs(times - 1) < LEAST:
        return f"{words}: undecided, less than {LEAST * 100:.0f} %"
    return f"{words}: {'slower' if times > 1 else 'FASTER'}"
