"""Merges what a run on a GPU measured into the tree: docs/benchmarks.md, and the calibration that ships with the
planner.

Usage: merge.py DIR          DIR: gpu-check.json and calibration.json of a run
       merge.py --render     write the page and the calibration anew from what is recorded

In: rows with where they are from. Out: bench/gpu/measured.json, the newest row of each case and kind of GPU; the table
between the marks of docs/benchmarks.md, and what the newest run decides; planner/src/profile/measured.rs. A row whose
commit or GPU is not that of the newest run is marked with its own; so are rows of a run that was stopped, and times
with the host's work, which are in no bar. What was measured over an emulated driver, with changes that are in no
commit, or by a pack that was not whole, is refused; times of kernels and forms that are not known to be right are not
taken, and no calibration by such. The planner ships the calibrations of an H200 and an H100 (SXM); that of another GPU,
or of a slice of one, is recorded beside them. What is merged twice, or behind a newer run, changes nothing of that.
Measures nothing.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import decisions
import report

ROOT = Path(__file__).resolve().parent.parent.parent
STORE = Path("bench/gpu/measured.json")
PAGE = Path("docs/benchmarks.md")
TABLES = Path("planner/src/profile/measured.rs")
BEGIN, END = "<!-- gpu-check: written by bench/gpu/merge.py -->", "<!-- gpu-check: end -->"
NONE = "not measured"
DIRECTIONS = ("forward", "backward")
# GPUs of which the planner has a table.
SHIPPED = ("h100", "h200")
# How the name of a processor ends that runs the portable kernels.
PORTABLE = "-portable"
SHIPPED_SXM = "an H100 and an H200 (SXM)"
COPIES = ("cadre_copy_rows_16", "cadre_copy_rows_4")
# Fields of a row that are not kept.
DROPPED = ("turns", "rounds", "base_rounds")
# Fields by which rows of one case differ from those of another.
KEYS = ("case", "direction", "kernel", "form", "order", "blocks", "l2")
NOTHING = (
    "Not measured: no GPU was at hand. `make gpu-check` measures it beside its peers in one call, and "
    "`bench/gpu/merge.py DIR` writes what it brings back here; see [Kernels](kernels.md#checked-with-a-gpu)."
)
# Bar on an H200, milestone, target; how it is read from rows.
BARS = (
    ("dense causal, 16K and longer, forward / backward, against cuDNN in the same run", "0.85 / 0.75", "1.0 / 1.0"),
    ("tasks as planned (128 rows to 32K), against the best of FA2 varlen and cuDNN ragged", "1.0", "1.15"),
    ("128-row tasks together, against one long document of equal pairs", "0.9", "0.97"),
    ("backward in fixed order, against deterministic / other peers", "–", "1.0 / 0.88"),
)


class RefusedError(Exception):
    """Numbers that the tree does not take."""


def key(row: dict) -> tuple:
    return (*(row.get(it) for it in KEYS), gpu_of(row))


def run_of(row: dict) -> tuple:
    """Fields by which rows of one run differ from those of another."""
    return gpu_of(row), row["provenance"].get("commit"), row["provenance"].get("date")


def gpu_of(row: dict) -> str:
    return row["provenance"].get("device", "unknown GPU")


def merged(past: dict, content: dict) -> dict:
    """The rows of a run over those that were recorded."""
    if content.get("dry"):
        raise RefusedError("it was measured over an emulated driver: it says nothing of a GPU")
    if content.get("dirty"):
        raise RefusedError("its pack was made with changes that are in no commit: commit, pack and run again")
    if content.get("commit", "unknown") == "unknown":
        raise RefusedError("its pack had no commit: pack in a clone and run again")
    for it in content.get("checks", []):
        if it["check"] == "pack" and not it["passed"]:
            raise RefusedError(f"its pack was not whole: {it['what']}")
    forms = [it for it in content["forms"] if not decisions.unsound(it, content)]
    of_run = {"stopped": True} if "stopped" in content else {}
    found = [it for it in [*content["speeds"], *forms] if not not_right(content, kernels_of(it))]
    found = [{name: it for name, it in row.items() if name not in DROPPED} | of_run for row in found]
    rates = [] if not_right(content, COPIES) else [it | of_run for it in content.get("rates", [])]
    date = content.get("date", "")
    # The decisions between forms stand below a heading.
    told = [*decisions.told(content)[1:], *content.get("notes", [])]
    newest = {"newest": content["commit"], "newest_date": date, "told": told}
    newest = {} if past.get("newest_date", "") > date else newest
    return past | newest | {"rows": over(past.get("rows", []), found), "rates": over(past.get("rates", []), rates)}


def over(past: list[dict], found: list[dict]) -> list[dict]:
    """The newest row of each case and kind of GPU, whatever run is merged last."""
    rows = {key(it): it for it in past}
    for row in found:
        if key(row) not in rows or date_of(rows[key(row)]) <= date_of(row):
            rows[key(row)] = row
    return list(rows.values())


def date_of(row: dict) -> str:
    return row["provenance"].get("date", "")


def with_calibration(store: dict, content: dict, text: str) -> dict:
    """The store with the calibration of a run."""
    try:
        calibration = json.loads(text)
        processor = calibration["processor"]
        dims = {it["head_dim"] for it in calibration["kernels"]}
    except (ValueError, KeyError, TypeError) as why:
        raise RefusedError(f"calibration.json is not whole ({why}): remove it, or run again") from why
    if words := calibration.get("partial"):
        raise RefusedError(f"calibration.json is partial: {words}: remove it, or run again")
    if bad := not_right(content, [f"cadre_{it}_{dim}" for dim in sorted(dims) for it in DIRECTIONS]):
        raise RefusedError(f"{bad[0]} is not known to be right: remove calibration.json, or run again with all stages")
    device = content.get("device", "")
    if device and processor.removesuffix(PORTABLE) != f"gpu-{device.lower().replace(' ', '-')}":
        raise RefusedError(f"calibration.json is of {processor}, the run was on {device}: remove it, or run again")
    date = content.get("date", "")
    calibration |= {"source": f"{calibration['source']}; commit {content['commit']}, {date or 'no date'}", "date": date}
    gpu = shipped(processor)
    where, name = ("calibrations", gpu) if gpu else ("calibrations_of_others", processor)
    known = store.get(where, {})
    if known.get(name, {}).get("date", "") > date:
        print(f"the calibration of {processor} stays that of {known[name]['date']}, which is newer")
        return store
    if not gpu:
        print(f"the calibration of {processor} is recorded and not shipped: the planner ships those of {SHIPPED_SXM}")
    return store | {where: known | {name: calibration}}


def shipped(processor: str) -> str:
    """The GPU whose table of the planner a calibration stands in for; none for a slice or another kind of one, or for
    portable kernels."""
    words = set(processor.split("-"))
    found = [it for it in SHIPPED if it in words]
    return found[0] if found and not words & {"mig", "pcie", "nvl", PORTABLE[1:]} else ""


def kernels_of(row: dict) -> list[str]:
    """Kernels that have to be right for a time to count: a backward pass has LSE of the forward pass before."""
    found = re.search(r" d(\d+),", row["case"])
    names = [f"cadre_{it}_{found[1] if found else '?'}" for it in DIRECTIONS]
    return [*names, *([f"{it}_softcap" for it in names] if "softcap" in row.get("kernel", "") else [])]


def not_right(content: dict, kernels: Sequence[str]) -> list[str]:
    return [it for it in kernels if content.get("kernels", {}).get(it) != "right"]


def least(rows: list[dict], field: str) -> str:
    """The bar with the peer that it is against: some peers are missing on some machines."""
    found = [(it[field], it.get(f"{field}_peer", "")) for it in rows if field in it]
    if not found:
        return NONE
    ratio, peer = min(found)
    return f"{ratio:.2f}{peer and f' against {peer}'}"


def bars(rows: list[dict]) -> list[tuple[str, ...]]:
    """What each bar is at, the worst of its cases: a number a direction or a kind of peers."""
    # A time that includes work of the host says nothing about a kernel.
    fair = [it for it in rows if it.get("without_host", True)]
    warm = [it for it in fair if it.get("l2") == "warm" and "kernel" in it]

    def ours(direction: str, words: str, kernel: str = "Cadre") -> list[dict]:
        return [it for it in warm if (it["direction"], it["kernel"]) == (direction, kernel) and words in it["case"]]

    def beside(direction: str, peer: str) -> str:
        found = []
        for it in ours(direction, "causal"):
            rows_of_case = int(it["case"].split("causal ")[1].split("K")[0]) if "K x" in it["case"] else 0
            wanted = (it["case"], direction, peer, run_of(it))
            theirs = [p for p in warm if (p["case"], p["direction"], p["kernel"], run_of(p)) == wanted]
            if rows_of_case >= 16 and theirs:
                found.append(theirs[0]["seconds"] / it["seconds"])
        return f"{min(found):.2f}" if found else NONE

    tasks = [*ours("forward", ", tasks "), *ours("backward", ", tasks ")]
    short = {
        it["direction"]: it["tflops"] for it in warm if "tasks of 128 rows" in it["case"] and it["kernel"] == "Cadre"
    }
    long = {
        it["direction"]: it["tflops"]
        for it in warm
        if "document of 32896 rows" in it["case"] and it["kernel"] == "Cadre"
    }
    shares = [f"{short[it] / long[it]:.2f}" if it in short and it in long else NONE for it in ("forward", "backward")]
    fixed = [it for it in warm if it["kernel"] == "Cadre fixed order"]
    return [
        (beside("forward", "cuDNN"), beside("backward", "cuDNN")),
        (least(tasks, "ratio"),),
        tuple(shares),
        (least(fixed, "ratio_deterministic"), least(fixed, "ratio")),
    ]


def bars_of(rows: list[dict], newest: list[dict]) -> list[str]:
    """By the newest commit; what it did not measure, by all, which is said."""
    found = []
    for now, ever in zip(bars(newest), bars(rows), strict=True):
        old = [f"{it} (another commit)" if it != NONE else it for it in ever]
        found.append(" / ".join(b if a == NONE else a for a, b in zip(now, old, strict=True)))
    return found


def of_copies(rates: list[dict], other: Callable[[dict], str]) -> list[str]:
    if not rates:
        return []
    lines = ["", "| copies of rows | GB/s | of the device's memcpy | from |", "|---|---:|---:|---|"]
    for it in sorted(rates, key=lambda it: (it["case"], gpu_of(it))):
        lines.append(f"| {it['case']} | {it['gigabytes']:.0f} | {it['ratio']:.2f} | {other(it)} |")
    return lines


def render(store: dict) -> str:
    rows = store.get("rows", [])
    newest = store.get("newest")
    of_newest = [it for it in rows if it["provenance"].get("commit") == newest]
    gpu = gpu_of([*rows, *of_newest][-1]) if rows else ""
    lines = [] if rows else [NOTHING + "\n"]
    lines += [f"| bar on an H200 | milestone | target | measured{gpu and f' on {gpu}'} |", "|---|---|---|---|"]
    at = bars_of([it for it in rows if gpu_of(it) == gpu], [it for it in of_newest if gpu_of(it) == gpu])
    lines += [f"| {' | '.join(bar)} | {number} |" for bar, number in zip(BARS, at, strict=True)]
    if not rows:
        return "\n".join(lines)
    origin = [*rows, *of_newest][-1]["provenance"]
    where = ", ".join(
        f"{name} {origin[name]}" for name in ("device", "driver", "torch", "cudnn", "date") if name in origin
    )

    def other(it: dict) -> str:
        commit = it["provenance"].get("commit")
        words = [] if commit == newest else [f"commit `{commit}`"]
        words += [] if gpu_of(it) == gpu else [gpu_of(it)]
        words += [] if it.get("without_host", True) else ["with the host's work"]
        return ", ".join([*words, *(["of a run that was stopped"] if it.get("stopped") else [])])

    lines += ["", f"Commit `{newest}`; {where}. Rows of another commit or GPU name it. ~: nearer to 1 than spread.", ""]
    lines += [
        "| case | pass | kernel | L2 | ms | spread | TFLOP/s | ratio | from |",
        "|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for it in sorted(rows, key=lambda it: [str(part) for part in key(it)]):
        kernel = it.get("kernel") or f"Cadre, {it['form']}, {it['blocks']} blocks {it['order']}".strip()
        ratio = f"{report.ratio(it)} {it.get('ratio_peer', '')}".strip() if "ratio" in it else ""
        lines.append(
            f"| {it['case']} | {it['direction']} | {kernel} | {it['l2']} | {it['seconds'] * 1e3:.3f} | "
            f"{it['spread']:.1%} | {it['tflops']:.0f} | {ratio} | {other(it)} |"
        )
    lines += of_copies(store.get("rates", []), other)
    if told := store.get("told"):
        lines += ["", f"What the run of commit `{newest}` decides and notes:", "", *(f"- {it}" for it in told)]
    return "\n".join(lines)


def into_page(page: str, text: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise RefusedError(f"{PAGE} lacks the marks {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{formed(text)}\n\n{END}{tail}"


def formed(text: str) -> str:
    """As lint wants Markdown: paragraphs within 100 columns, tables without padding."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|-"):
            cells = ["-:" if it.endswith(":") else "--" for it in line.strip("|").split("|")]
            lines.append(f"| {' | '.join(cells)} |")
        elif line.startswith("|"):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            words = {"subsequent_indent": indent, "break_long_words": False, "break_on_hyphens": False}
            lines.append(textwrap.fill(line, 100, **words))
    return "\n".join(lines)


def tables(calibrations: dict[str, dict]) -> str:
    """Calibrations by GPU as Rust, which the planner compiles: it reads no files."""
    head = (
        "//! Calibrations that were measured on an H200 and an H100, written by `bench/gpu/merge.py`; none where none "
        "was.\n//!\n//! In and out: numbers. Nothing here is written by hand.\n\n"
    )
    if not calibrations:
        return head + (
            "use super::Profile;\n\n/// None was measured yet.\n"
            "pub(super) fn profile(_gpu: &str) -> Option<Profile> {\n    None\n}\n"
        )
    lines = [head + "use super::{Direction, Kept, LinkTimes, Profile, Table, VERSION};\n\n/// As measured."]
    lines += ["pub(super) fn profile(gpu: &str) -> Option<Profile> {", "    match gpu {"]
    lines += [f"        {rust(gpu)} => Some({gpu}())," for gpu in sorted(calibrations)]
    lines += ["        _ => None,", "    }", "}"]
    for gpu, calibration in sorted(calibrations.items()):
        lines += table_of(gpu, calibration)
    return "\n".join([*lines, ""])


def table_of(gpu: str, calibration: dict) -> list[str]:
    lines = ["", "#[rustfmt::skip]", f"fn {gpu}() -> Profile {{", "    Profile {"]
    lines += ["        version: VERSION,", "        partial: None,"]
    lines += [f"        {it}: {rust(calibration[it])}.into()," for it in ("processor", "source")]
    lines += [f"        {it}: {calibration[it]:_}," for it in ("task_nanoseconds", "linear_operations")]
    lines.append("        kernels: vec![")
    for it in calibration["kernels"]:
        times = ", ".join(f"vec!{numbers(row)}" for row in it["picoseconds"])
        lines.append(
            f"            Table {{ head_dim: {it['head_dim']}, direction: Direction::{it['direction'].capitalize()}, "
            f"kept: Kept::{it['kept'].capitalize()}, rows: vec!{numbers(it['rows'])}, "
            f"keys: vec!{numbers(it['keys'])}, picoseconds: vec![{times}] }},"
        )
    links = ", ".join(
        f"LinkTimes {{ distance: {rust(it['distance'])}.into(), rate: {it['rate']:_}, latency: {it['latency']:_} }}"
        for it in calibration["links"]
    )
    # The names have to be used where there is no link.
    lines += ["        ],", f"        links: Vec::<LinkTimes>::from([{links}]),"]
    # Where the workers of a cluster are is told by a file of that cluster.
    return [*lines, "        places: Vec::new(),", "        unreachable: Vec::new(),", "    }", "}"]


def numbers(row: list[int]) -> str:
    """As lint wants long ones."""
    return f"[{', '.join(f'{it:_}' for it in row)}]"


def rust(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def main(words: list[str]) -> int:
    store_path = ROOT / STORE
    store = json.loads(store_path.read_text()) if store_path.exists() else {}
    if words != ["--render"]:
        if len(words) != 1:
            print(__doc__)
            return 2
        folder = Path(words[0])
        try:
            content = json.loads((folder / "gpu-check.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as why:
            raise RefusedError(
                f"{folder} holds no gpu-check.json of a run ({why}): name the folder that run.py filled"
            ) from why
        store = merged(store, content)
        found = folder / "calibration.json"
        if found.exists():
            store = with_calibration(store, content, found.read_text(encoding="utf-8"))
        store_path.write_text(json.dumps(store, indent=1, sort_keys=True) + "\n")
    page = ROOT / PAGE
    page.write_text(into_page(page.read_text(), render(store)))
    (ROOT / TABLES).write_text(tables(store.get("calibrations", {})))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RefusedError as why:
        sys.exit(f"error: {why}")
