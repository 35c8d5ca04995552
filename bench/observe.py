#!/usr/bin/env python3
"""What `cadre.observe` adds to a step: the seconds that its hooks take, as a part of a step of a small Llama.

    scripts/pytorch python bench/observe.py

In: the environment of PyTorch, into which it starts itself anew. Out: target/bench/observe.json, and a line. The hooks
are timed from within, since what they take is far below what steps scatter. Steps with hooks and without alternate.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS, TOKENS = 30, 512


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import cadre
    import torch
    from cadre._observe import Observer
    from pytorch_books import packed
    from pytorch_models import llama

    spent = [0.0]
    for name in ("_before", "_after", "_stepped"):
        inner = getattr(Observer, name)

        def timed(self, *arguments, inner=inner):
            began = time.perf_counter()
            inner(self, *arguments)
            spent[0] += time.perf_counter() - began

        setattr(Observer, name, timed)
    torch.set_num_threads(1)
    model = llama("sdpa")
    optimizer = torch.optim.AdamW(model.parameters())
    batches = packed(0, TOKENS)

    def step() -> float:
        batch, began = next(batches), time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    step()
    without, hooks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(STEPS):
            without.append(step())
            observer = cadre.observe(model, folder)
            # The second step writes the line of the first.
            step()
            spent[0] = 0.0
            step()
            hooks.append(spent[0])
            observer.close()
    took, own = statistics.median(without), statistics.median(hooks)
    line = {
        "case": f"observe: hooks of a step of {TOKENS} tokens",
        "ours": own * 1e3,
        "peer": took * 1e3,
        "peer_name": "the step",
        "unit": "ms",
        "ratio": took / own,
    }
    results = ROOT / "target" / "bench"
    results.mkdir(parents=True, exist_ok=True)
    (results / "observe.json").write_text(json.dumps([line]) + "\n")
    print(f"hooks {own * 1e6:.0f} us of a step of {took * 1e3:.1f} ms: {100 * own / took:.3f} %")


if __name__ == "__main__":
    if "CADRE_PROGRAMS" not in os.environ:
        os.execv(ROOT / "scripts" / "pytorch", ["pytorch", "python", __file__])
    main()
