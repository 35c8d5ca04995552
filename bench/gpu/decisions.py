"""What the times of forms decide: which form of a kernel, which order of dQ, how many processors.

In: rows of times, as cadre-gpu-probe tells them. Out: lines, each with the two times that decide, and by how much. A
difference below the spread of either decides nothing and says so. Pure.
"""

from __future__ import annotations

BUILT = "as built"
# What a form is there to decide, and the order of dQ in which it can differ.
QUESTIONS = {
    "poll": ("turns at dQ are polled relaxed and with pauses, not acquired at once", ("fixed",)),
    "panels": ("dQ of head dim 64 by products over whole panels, not half a panel each", ("fixed", "arrival")),
}


def told(rows: list[dict]) -> list[str]:
    """Of warm runs; a case once, as the last that was measured."""
    found: dict[tuple, dict] = {}
    for it in rows:
        if it["l2"] == "warm":
            found[it["case"], it["direction"], it["order"], it["form"], it["blocks"]] = it
    lines = []
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
    times = it["seconds"] / base["seconds"]
    ours, theirs = it["seconds"] * 1e3, base["seconds"] * 1e3
    words = f"{ours:.3f} ms ({it['tflops']:.0f} TFLOP/s) beside {theirs:.3f}, {times:.3f} times"
    if not (it.get("without_host", True) and base.get("without_host", True)):
        words += ", with the host's work between runs"
    if abs(times - 1) <= max(it["spread"], base["spread"]):
        return f"{words}: undecided, the spread is {max(it['spread'], base['spread']):.1%}"
    return f"{words}: {'slower' if times > 1 else 'FASTER'}"
