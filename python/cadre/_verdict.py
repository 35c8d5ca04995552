"""What `cadre check` tries with a job, and what it finds: the updates of the pass `one`, and comparisons.

In: what each rank kept of the passes `base` and `again`; the results of each update that the job's loop was handed.
Out: lines of JSON in the check's folder, one a check.
"""

import atexit
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import _check, _job, _recut, _spanning
from ._check import Check, Made, Update
from ._layout import Stretch
from ._recut import NotTriedError

CALLS = "each layer is called once a batch, as announced"
AGAIN = "the same bits in a second run"
REPLICAS = "the same weights on all ranks"
PLAIN = "loss and gradients of one rank with plain attention"
TOKEN = "a token changes its own document alone"
ALONE = "a document alone has the same attention"
LENGTHS = "lengths of 1, odd and ragged"
ALL = (CALLS, AGAIN, REPLICAS, PLAIN, TOKEN, ALONE, LENGTHS)

Base = list[list[tuple[Update, Made]]]
"""By rank: updates of the pass `base`, and what they came to."""

TOGETHER = "micro-batches go through a layer together, so that nothing says whose a call is"
NO_CALL = (
    'no call of Cadre\'s attention was seen; give the model attn_implementation="cadre", or call '
    "cadre.flash_attn_varlen_func"
)

# Relative to the largest: sums in another order, in products of other shapes.
_SAME = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Findings:
    """Lines of the table, one for each check."""

    def __init__(self, check: Check) -> None:
        self.folder, self.trying = check.folder, check.folder / "trying"
        self.said: set[str] = set()
        atexit.register(self._at_exit)

    def __call__(self, check: str, found: str | None, note: str = "") -> None:
        self.line(check, "found" if found else "ok", found or note)

    def line(self, check: str, verdict: str, detail: str) -> None:
        self.said.add(check)
        with (self.folder / "findings.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"check": check, "verdict": verdict, "detail": detail}) + "\n")

    def rest(self, why: str) -> None:
        """Every check has a line, also one that was not tried."""
        for it in ALL:
            if it not in self.said:
                self.line(it, "not tried", why)

    @contextmanager
    def about(self, check: str) -> Iterator[None]:
        """If the process ends inside, that is a finding of this check."""
        self.trying.write_text(check)
        try:
            yield
        except NotTriedError as why:
            self.line(check, "not tried", str(why))
        self.trying.unlink()

    def _at_exit(self) -> None:
        if not self.trying.exists():
            return
        check = self.trying.read_text()
        if error := getattr(sys, "last_value", None):
            self.line(check, "found", f"the job ended with {type(error).__name__}: {error}")
            self.trying.unlink()
            (self.folder / "one" / "ended-0").touch()
        # Otherwise whoever started the process reports how it ended.
        self.said.add(check)
        self.rest(f"the job had ended: see `{check}`")


def probes(check: Check, layout: Callable[[Any], Any]) -> Iterator[Update]:
    """The updates of the pass `one`. Behind each the results are in `check.made`."""
    found = Findings(check)
    ranks = range(len(list((check.folder / "base").glob("updates-*.pt"))))

    def told(of: str, name: str) -> list[Any]:
        return [torch.load(check.folder / of / f"{name}-{it}.pt", weights_only=False) for it in ranks]

    digests, calls = told("base", "digests"), [it for of in told("base", "calls") for it in of]
    if calls:
        found(CALLS, next((refused for refused, _ in calls if refused), None))
    else:
        found.line(CALLS, "not tried", TOGETHER)
    found(AGAIN, again(digests, told("again", "digests")))
    found(REPLICAS, replicas(digests))
    try:
        if not all(are_once for _, are_once in calls):
            raise NotTriedError("a batch goes through the layers more or less than once, which no pool takes")
        yield from of_one_rank(check, found, told("base", "updates"), layout)
    except NotTriedError as why:
        found.rest(str(why))


def of_one_rank(check: Check, found: Findings, base: Base, layout: Callable[[Any], Any]) -> Iterator[Update]:
    """The updates whose results are compared."""
    if any(isinstance(it, Stretch) for update, _ in base[0] for layout in update.layouts for it in layout):
        base = [of_whole_documents(base)]
    weights: list[Tensor] = []
    with found.about(PLAIN):
        until_steps = until_each_step([made for _, made in base[0]])
        # The first updates tell the parameters.
        for at in until_steps[0]:
            yield base[0][at][0]
        weights, kept = stepped(check.made).weights, base[0][until_steps[0][-1]][1].weights
        if [it.shape for it in weights] != [it.shape for it in kept]:
            raise NotTriedError("one rank has other parameters than one of several; their optimizer shares them out")
        alike = [_check.digest(it) for it in weights] == [_check.digest(it) for it in kept]
        note = "" if alike else "one rank begins with other weights; "
        yield from against_one_rank(check, found, base, until_steps, note)
    check.plain = False
    if not weights:
        raise NotTriedError(f"the parameters are not known: see `{PLAIN}`")
    if not check.calls:
        raise NotTriedError(TOGETHER)
    update, at = with_documents(base)
    start = Start(check, weights, layout, update, at)
    packed: list[Tensor] = []
    with found.about(TOKEN):
        yield start.of(start.batch, start.lengths)
        packed = check.made.attention[at]
        if not packed:
            raise NotTriedError(NO_CALL)
        yield from with_another_token(check, found, start, packed)
    if not packed:
        raise NotTriedError(NO_CALL)
    with found.about(ALONE):
        yield from alone(check, found, start, packed)
    with found.about(LENGTHS):
        yield from with_ragged_lengths(check, found, start)


def until_each_step(made: list[Made]) -> list[range]:
    """Ranges of updates, each up to one in which an optimizer made a step."""
    ends = [at + 1 for at, it in enumerate(made) if it.weights]
    if not ends:
        raise NotTriedError(f"no optimizer of torch made a step in {len(made)} updates")
    return [range(*it) for it in itertools.pairwise([0, *ends])]


def stepped(made: Made) -> Made:
    """The results of an update that ends with a step of an optimizer."""
    if not made.weights:
        raise NotTriedError("with one rank the optimizer makes its steps in other updates than with several")
    return made


def with_another_token(check: Check, found: Findings, start: "Start", packed: list[Tensor]) -> Iterator[Update]:
    batch, lengths = start.batch, start.lengths
    if len(lengths) < 2:
        raise NotTriedError("no batch of the first steps has two documents")
    document = len(lengths) // 2
    row = sum(lengths[:document]) + lengths[document] // 2
    yield start.of(_recut.with_another_token(batch, sum(lengths), row), lengths)
    found(TOKEN, leaks(packed, check.made.attention[start.at], lengths, document, row))


def alone(check: Check, found: Findings, start: "Start", packed: list[Tensor]) -> Iterator[Update]:
    lengths, said = start.lengths, None
    for document in sorted({len(lengths) // 2, len(lengths) - 1} - {0}):
        first, rows = sum(lengths[:document]), lengths[document]
        yield start.of(_recut.of_pieces(start.batch, lengths, [(first, first + rows)]), [rows])
        of = [it[first : first + rows] for it in packed]
        where = f"document {document} of {rows} rows, from row {first} of its batch on,"
        said = said or apart(of, check.made.attention[start.at], _NEAR, f"{where} has other results alone")
    found(ALONE, said and f"{said}; look at its positions, and at what layers hand from row to row")


def with_ragged_lengths(check: Check, found: Findings, start: "Start") -> Iterator[Update]:
    lengths, pieces = start.lengths, ragged(sum(start.lengths))
    batch, told = _recut.of_pieces(start.batch, lengths, pieces), [end - first for first, end in pieces]
    yield start.of(batch, told)
    ours = check.made.attention[start.at]
    check.plain = True
    yield start.of(batch, told)
    check.plain = False
    found(LENGTHS, apart(ours, check.made.attention[start.at], _NEAR, f"lengths {told}"), f"lengths {told}")


def of_whole_documents(base: Base) -> list[tuple[Update, Made]]:
    """Batches for the single rank where documents span ranks: in each micro-batch the rows of all ranks."""
    made = []
    for of in zip(*base, strict=True):
        micro_batches = list(zip(*(it[0].layouts for it in of), strict=True))
        batches, drawn = (
            [_spanning.joined(*it) for it in zip(zip(*these, strict=True), micro_batches, strict=True)]
            for these in ([it[0].batches for it in of], [it[0].drawn for it in of])
        )
        lengths = [_spanning.lengths_of_whole(layouts) for layouts in micro_batches]
        mean = [sum(losses) / len(of) for losses in zip(*(it[1].losses for it in of), strict=False)]
        made.append((Update(batches, lengths, of[0][0].random, drawn), dataclasses.replace(of[0][1], losses=mean)))
    return made


class Start:
    """Updates that begin with the same weights and differ in one batch."""

    def __init__(self, check: Check, weights: list[Tensor], layout: Callable, update: Update, at: int) -> None:
        self.check, self.weights, self.layout, self.update, self.at = check, weights, layout, update, at
        self.batch, self.lengths = update.drawn[at], update.layouts[at]

    def of(self, batch: Any, lengths: list[int]) -> Update:
        # It may change its batch, which further updates are made of.
        batch = _recut.copied(batch)
        told = _check.told_layout(self.layout(batch))
        if told != lengths:
            raise NotTriedError(f"`layout` says {told} of a batch whose documents have {lengths} rows")
        restore(self.check, self.weights)
        batches, layouts = list(self.update.batches), list(self.update.layouts)
        batches[self.at], layouts[self.at] = batch, lengths
        return Update(batches, layouts, list(self.update.random))


def restore(check: Check, weights: list[Tensor]) -> None:
    for it, value in zip(check.parameters, weights, strict=True):
        _check.put(it, value)


def with_documents(base: Base) -> tuple[Update, int]:
    """The micro-batch with the most documents, from the first step that has one with several."""
    of_step = ([it[step][0] for it in base] for step in range(len(base[0])))
    for updates in of_step:
        count, rank, at = max(
            (len(it), rank, -at) for rank, of in enumerate(updates) for at, it in enumerate(of.layouts)
        )
        if count > 1:
            return updates[rank], -at
    return base[0][0][0], 0


def again(one: list[list[list[tuple[str, str]]]], other: list[list[list[tuple[str, str]]]]) -> str | None:
    """By rank and step: the first thing that differs in a second run."""
    said = []
    for rank, (its, theirs) in enumerate(zip(one, other, strict=True)):
        for step, (first, second) in enumerate(zip(its, theirs, strict=False)):
            same = zip(first, second, strict=False)
            if first != second:
                what = next((a[0] for a, b in same if a != b), "the number of calls of attention")
                said.append(f"rank {rank}, step {step}: {what}")
                break
    return f"{'; '.join(said)} came out with other bits (what is first is named)" if said else None


def replicas(digests: list[list[list[tuple[str, str]]]]) -> str | None:
    """Compares the weights of ranks that hold all of them."""

    def weights(rank: int, step: int) -> list[tuple[str, str]]:
        return [it for it in digests[rank][step] if it[0].startswith("parameter")]

    for rank in range(1, len(digests)):
        for step in range(min(len(digests[0]), len(digests[rank]))):
            one, other = weights(0, step), weights(rank, step)
            if one != other and len(one) == len(other):
                what = next(a[0] for a, b in zip(one, other, strict=True) if a != b)
                why = "gradients are not summed over ranks" if step else "ranks begin with weights of their own"
                return f"rank {rank}, before step {step}: {what} is not that of rank 0; {why}"
    return None


def against_one_rank(
    check: Check, found: Findings, base: Base, until_steps: list[range], note: str
) -> Iterator[Update]:
    notes = [note] if note else []
    for updates in until_steps:
        results, step = [], updates[-1]
        expected = base[0][step][1]
        for of in base:
            for at in updates:
                check.plain = True
                restore(check, expected.weights)
                yield of[at][0]
            results.append(stepped(check.made))
        if (said := gradients(expected, results, notes)) or (said := loss(step, base, results, notes)):
            found(PLAIN, f"{note}step {step}: {said}")
            return
    found(PLAIN, None, "; ".join(dict.fromkeys(notes)))


def gradients(expected: Made, results: list[Made], notes: list[str]) -> str | None:
    """Gradients of several ranks are a sum of those that each has alone, with some weights: a mean, usually. Clipping
    and weights by tokens are other weights, and the job's own affair."""
    own = [it.gradients for it in results]
    at = [it for it, value in enumerate(expected.gradients) if value is not None]
    if any([it for it, value in enumerate(of) if value is not None] != at for of in own):
        return "one rank has gradients of other parameters"
    if not at:
        return "no parameter has a gradient when the optimizer makes its step; look at where zero_grad is called"

    def dot(one: list, other: list) -> float:
        return sum(float(one[it].double().flatten() @ other[it].double().flatten()) for it in at)

    whole = dot(expected.gradients, expected.gradients) ** 0.5
    if not whole:
        return "all gradients are zero, and those of one rank are not" if any(dot(it, it) for it in own) else None
    gram = torch.tensor([[dot(one, other) for other in own] for one in own], dtype=torch.float64)
    right = torch.tensor([dot(it, expected.gradients) for it in own], dtype=torch.float64)
    shares = torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution.flatten()
    errors = {}
    for it in at:
        mixed = sum(share * of[it].double() for share, of in zip(shares, own, strict=True))
        errors[it] = float((mixed - expected.gradients[it].double()).norm())
    error = sum(it**2 for it in errors.values()) ** 0.5
    bound = _NEAR.get(expected.gradients[at[0]].dtype, 5e-2)
    if not error <= bound * whole:
        worst = max(errors, key=errors.get)
        shape = tuple(expected.gradients[worst].shape)
        return f"gradients are {error / whole:.1e} off, most of all parameter {worst} of shape {shape}"
    least = int(shares.abs().argmin())
    if float(shares[least].abs()) < 1e-3 * float(shares.abs().max()):
        return f"gradients do not depend on the batches of rank {least}"
    if float((shares - shares.mean()).abs().max()) > 1e-2 * float(shares.abs().max()):
        notes.append("ranks weigh " + " and ".join(f"{it:.3f}" for it in shares.tolist()))
    return None


def loss(step: int, base: list, results: list[Made], notes: list[str]) -> str | None:
    told, own = ([it.losses for it in of] for of in ([of[step][1] for of in base], results))
    if not all(told) or not all(own):
        notes.append("no loss was reported (cadre.report)")
        return None
    several, one = (sum(it[-1] for it in of) / len(of) for of in (told, own))
    least, most = min(it[-1] for it in own), max(it[-1] for it in own)
    slack = 1e-4 * abs(one)
    # A mean loss weighted by tokens lies between the losses of the ranks.
    if abs(several - one) <= slack or (notes and least - slack <= several <= most + slack):
        return None
    return f"the loss is {several:.6f}, that of one rank with plain attention {one:.6f}"


def leaks(one: list[Tensor], other: list[Tensor], lengths: list[int], document: int, row: int) -> str | None:
    """Finds documents that depend on a token of another one, and rows that depend on a later one."""
    if len(one) != len(other):
        return f"attention was called {len(one)} times, and {len(other)} times with another token"
    if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        return f"another token at row {row} changes nothing: attention does not depend on the batch"
    starts = [sum(lengths[:it]) for it in range(len(lengths))]
    rows = [(f"document {it}", starts[it], starts[it] + lengths[it]) for it in range(len(lengths)) if it != document]
    if not any(str(it).startswith("full") for it in _job.current().shape.kinds):
        rows.append((f"earlier rows of document {document}", starts[document], row))
    for call, (a, b) in enumerate(zip(one, other, strict=True)):
        bound = _SAME[a.dtype] * float(a.abs().max())
        for name, start, end in rows:
            if end > start and not (change := float((a[start:end] - b[start:end]).abs().max())) <= bound:
                of = f"a token of document {document} (row {row})"
                return f"{of} changed {name} by {change:.1e} in attention call {call}"
    return None


def apart(one: list[Tensor], other: list[Tensor], bounds: dict[torch.dtype, float], what: str) -> str | None:
    """The first call of attention whose results differ."""
    if len(one) != len(other):
        return f"{what}: attention was called {len(one)} times, and {len(other)} times"
    for call, (a, b) in enumerate(zip(one, other, strict=True)):
        error = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30)
        if not error <= bounds[a.dtype]:
            return f"{what}: attention call {call} is {error:.1e} off"
    return None


def ragged(rows: int) -> list[_recut.Piece]:
    """Lengths to try: 1 row twice, odd numbers, and the rest in two unequal parts."""
    if rows < 8:
        raise NotTriedError(f"a batch of {rows} rows is too short")
    pieces, start = [], 0
    for length in (1, 1, 3, 17, (rows - 22) * 2 // 3 | 1):
        if length > 0 and start + length < rows:
            pieces.append((start, start + length))
            start += length
    return [*pieces, (start, rows)]
