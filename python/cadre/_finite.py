"""Results of the pool that are not finite: reported, and passed on.

In: what the session says of a call's results. Out: a line in this process' log and in the job's.
"""

import sys

from ._native import Session

# Maximum steps of which a rank reports results that are not finite.
_TOLD = 20


class NotFinite:
    """Reports the first results of a step that are not finite."""

    def __init__(self, session: Session | None) -> None:
        self.session, self.last, self.steps = session, -1, 0

    def found(self, step: int, what: str | None) -> None:
        """`what` the session says of a call's results; none: all are finite."""
        if what is None or step == self.last or self.steps == _TOLD:
            return
        self.last, self.steps = step, self.steps + 1
        more = "; nothing is said of further steps" if self.steps == _TOLD else ""
        text = f"{what}. It is passed on, with all that follows from it in this step{more}"
        print(f"cadre: {text}", file=sys.stderr, flush=True)
        self.session.warn(text)
