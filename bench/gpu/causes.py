"""What failures have in common: each cause is told once, with what it means and where to look.

In: failed rows; what the diagnosis has found of kernels. Out: lines, causes with the most rows first, the words of
the first row of each, how many others there are. Pure.
"""

from __future__ import annotations

import re

INSIDE_A_PANEL = (
    "dQ's product (N = 32) has an operand that begins inside a panel of 128 bytes, which no published layout covers; "
    "the form `panels` avoids it: if that one is right, use it"
)
# Where something is wrong in dQ of head dim 64 alone, columns of the second half.
HINTS = {("cadre_backward_64", "dQ"): INSIDE_A_PANEL}

# How a part ended because of the kernel that it had launched.
ENDS = ("hang", "fault")


def cause_of(row: dict) -> str:
    """A key that failed rows of one cause share: the kernel, the test, or the words without their numbers."""
    if "cause" in row:
        return row["cause"]
    if row.get("how") in ENDS:
        # Of as many kernels as do so; what differs between them, their diagnosis says.
        return f"{row['check']}: {row['how']}, {row['what'].split(', at: ')[0]}"
    if kernel := row.get("kernel"):
        return f"{kernel}: {row['what'] if len(row['what']) < 12 else 'ends otherwise'}"
    return re.sub(r"[0-9.]+", "#", f"{row['check'].split(',')[0]}: {row['what']}")


def hint(row: dict, rows: list[dict]) -> str:
    """What a wrong result of a kernel means, by which of its tables are wrong."""
    wrong = {it["what"] for it in rows if it.get("kernel") == row.get("kernel")}
    if wrong == {"dQ"}:
        return row.get("hint") or HINTS.get((row.get("kernel"), "dQ"), "")
    return row.get("hint", "")


def told(failed: list[dict], content: dict) -> list[str]:
    groups: dict[str, list[dict]] = {}
    for row in failed:
        groups.setdefault(cause_of(row), []).append(row)
    lines = []
    for rows in groups.values():
        row = rows[0]
        more = f" (and {len(rows) - 1} more rows of this cause)" if len(rows) > 1 else ""
        error = f", {row['error']:.2e}" if row["error"] != 1.0 else ""
        lines.append(f"FAILED {row['check']}: {row['what']}{error}{more}")
        if others := sorted({it["kernel"] for it in rows if it.get("how") in ENDS} - {row.get("kernel")}):
            lines.append(f"  so do: {', '.join(others)}")
        lines += [f"  {line}" for line in wrong_lines(row)]
        if words := hint(row, failed):
            lines.append(f"  {words}")
    alike: dict[str, list[str]] = {}
    found = content.get("diagnosis", {})
    for kernel, words in found.items():
        alike.setdefault(re.sub(r"\d+", "#", "\n".join(words)), []).append(kernel)
    for kernel, *others in alike.values():
        lines += [f"DIAGNOSIS {kernel}: {found[kernel][0]}", *(f"  {it}" for it in found[kernel][1:])]
        if others:
            lines.append(f"  the same but for numbers: {', '.join(others)}")
    return lines


def wrong_lines(row: dict) -> list[str]:
    it = row.get("wrong")
    if not it:
        return []
    lines = [row["worst"]] if "worst" in row else []
    lines += [f"first wrong: {it['first']}: {it['ours']}, right is {it['right']}; wrong are {it['count']}"]
    if "columns" in it:
        lines.append(f"wrong rows {it['rows']}; heads {it['heads']}; columns {it['columns']}")
    if it.get("tile"):
        lines.append(f"its tile: {it['tile']}")
    if it.get("operands"):
        lines.append("its operands: " + "; ".join(f"{k} {v}" for k, v in it["operands"].items())[:500])
    return lines


def other_gradients(case: str, kernel: str, words: dict[str, str]) -> dict:
    """As `disagreement`, of peers whose O is Cadre's."""
    what = f"gradients of no peer are Cadre's: {'; '.join(f'{name}: {it}' for name, it in words.items())}"
    more = {"kernel": kernel, "how": "wrong"} if len(words) > 1 else {}
    return {"check": f"{case}, beside peers", "what": what, "error": 1.0, "passed": False, **more}


def disagreement(case: str, kernel: str, off: dict[str, float]) -> dict:
    """A failed row where peers run and none has Cadre's O: at such sizes nothing else says whether it is right."""
    words = f"O of no peer is Cadre's: {', '.join(f'{name} is off by {it:.1e}' for name, it in off.items())}"
    # One peer alone may be wrong; several that agree are taken to be right.
    more = {"kernel": kernel, "how": "wrong"} if len(off) > 1 else {}
    return {"check": f"{case}, beside peers", "what": words, "error": min(off.values()), "passed": False, **more}
