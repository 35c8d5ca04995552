#!/usr/bin/env python3
"""Draws balance.svg, the README's figure: one layer on four trainers, attention at home and on the pool.

Usage: balance.py writes balance.svg beside this file; balance.py --check compares it and writes nothing.

Every bar is computed from operation counts of one forward layer (width 4096, feed-forward 11008), not measured: four
trainers with 64K tokens each, whose documents differ in length. Linear work is the same everywhere; attention grows
with the square of a document's length. On the pool the same four processors share the attention evenly.
"""

import sys
from pathlib import Path

WIDTH, FEED_FORWARD = 4096, 11008
THOUSAND = 1024
DOCUMENTS = [[64], [32] * 2, [8] * 8, [2] * 32]  # thousands of tokens, per trainer
ATTENTION = ["#b5432a", "#d98a3d", "#4f8a8b", "#7a6aa8"]  # by the trainer that holds the document
LINEAR, IDLE, INK = "#c9d3dc", "#f3f3f0", "#2b3036"

LEFT, BAR, GAP, SCALE_TO = 96, 26, 10, 560
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def linear(tokens: int) -> float:
    """Operations of the projections and the feed-forward block."""
    return tokens * 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * FEED_FORWARD)


def attention(rows: int) -> float:
    """Operations of causal core attention on one document: two products over half of the square."""
    return 2 * 2 * WIDTH * rows * rows / 2


def rect(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{fill}"/>'


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{INK}">{words}</text>'
    )


def panel(top: float, title: str, rows: list[list[tuple[float, str]]], end: float, scale: float) -> list[str]:
    """One chart: a bar of (length, colour) pieces per trainer, idle time up to the slowest one."""
    out = [text(16, top, title, 15, weight="bold")]
    for index, pieces in enumerate(rows):
        y = top + 14 + index * (BAR + GAP)
        out.append(text(16, y + 18, f"trainer {index}"))
        out.append(rect(LEFT, y, end * scale, IDLE))
        x = float(LEFT)
        for length, colour in pieces:
            out.append(rect(x, y, length * scale, colour))
            x += length * scale
        idle = 1 - sum(length for length, _ in pieces) / end
        if idle > 0.02:
            out.append(text(LEFT + end * scale - 8, y + 18, f"waits {idle:.0%}", 12, "end"))
    line = LEFT + end * scale
    bottom = top + 14 + 4 * (BAR + GAP) - GAP + 6
    out.append(f'<line x1="{line:.1f}" y1="{top + 8}" x2="{line:.1f}" y2="{bottom}" stroke="{INK}"/>')
    return out


def figure() -> str:
    tokens = 64 * THOUSAND
    same = linear(tokens)
    own = [sum(attention(rows * THOUSAND) for rows in documents) for documents in DOCUMENTS]
    at_home = [[(same, LINEAR), (cost, colour)] for cost, colour in zip(own, ATTENTION, strict=True)]
    shares = [(cost / len(own), colour) for cost, colour in zip(own, ATTENTION, strict=True)]
    on_pool = [[(same, LINEAR), *shares] for _ in own]
    slowest, even = same + max(own), same + sum(own) / len(own)
    scale = SCALE_TO / slowest

    out = panel(28, "Attention where the document lives: everyone waits for the longest", at_home, slowest, scale)
    out += panel(212, "Attention on the pool: the same processors, the same work", on_pool, even, scale)
    x = LEFT + even * scale + 12
    out.append(text(x, 292, f"{slowest / even:.2f} × as fast", 18, weight="bold"))
    y = 396
    out.append(rect(LEFT, y, 18, LINEAR))
    out.append(text(LEFT + 24, y + 18, "linear layers"))
    names = ["1 × 64K", "2 × 32K", "8 × 8K", "32 × 2K"]
    for index, (name, colour) in enumerate(zip(names, ATTENTION, strict=True)):
        out.append(rect(LEFT + 124 + index * 108, y, 18, colour))
        out.append(text(LEFT + 148 + index * 108, y + 18, name))
    out.append(text(LEFT, y + 46, "Colours: attention of the documents of trainer 0, 1, 2, 3 (tokens).", 12))
    out.append(
        text(LEFT, y + 62, "Computed from operation counts of one layer, transfer hidden; not a measurement.", 12)
    )
    body = "\n".join(out)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 472" role="img" '
        'aria-label="Four trainers with attention at home and on the pool">\n'
        '<rect width="700" height="472" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


def main() -> int:
    path = Path(__file__).with_name("balance.svg")
    if sys.argv[1:] == ["--check"]:
        if not path.exists() or path.read_text() != figure():
            print("docs/figures/balance.svg is not what balance.py draws; run `python3 docs/figures/balance.py`")
            return 1
        return 0
    path.write_text(figure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
