"""A rank of a tiny model that ends in a way of its own: by a mistake, an error, a signal.

In: the environment of a job, `--how`, `--rank`, which one does it, and `--at`, in which step, or when it has left its
job. Out: `losses-RANK` in the folder of the job, those that it has reported, the same on all ranks; `saved-RANK`, where
the loop ended early: the steps that are done, and whether SIGTERM came.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import cadre
import torch


def ends(how: str, rows: torch.Tensor) -> None:
    match how:
        case "mistake":
            cadre.flash_attn_varlen_func(*(rows.half(),) * 3, None, None, 0, 0, causal=True)
        case "turn":
            # The session finds it.
            more = {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0, "validation_loss": None}
            cadre._job.current().session.done(7, **more, tokens=0, seconds=0.0)
        case "error":
            raise ValueError("the loader broke")
        case "code":
            sys.exit(7)
        case "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        case "slow":
            time.sleep(6)
        case "forked":
            # A worker of a loader that goes on without its rank, outside of what the supervisor ends with that.
            if os.fork() == 0:
                os.setsid()
                folder = Path(os.environ["CADRE_OUT"])
                while folder.exists() and not (folder / "code-0").exists():
                    time.sleep(0.05)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            # Rank 0 waits for this rank's rows and hears of Ctrl-C meanwhile; or never.
            heard = Path(os.environ["CADRE_OUT"]) / "heard"
            until = time.monotonic() + 60
            while not heard.exists() and time.monotonic() < until:
                time.sleep(0.05)
            if not heard.exists():
                (heard.parent / "gave-up").touch()
        case "death":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def away(out: Path, *, is_longest: bool) -> None:
    """Works elsewhere, as a rank that saves the model, or waits for that one."""
    cadre.busy(60)
    if is_longest:
        time.sleep(6)
        (out / "saved").touch()
    while not (out / "saved").exists():
        time.sleep(0.05)


def hears(out: Path) -> None:
    """Of Ctrl-C, wherever the rank is then."""
    (out / "heard").touch()
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", type=int, default=1, help="step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--more", type=int, default=0, help="steps of rank 1 alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, losses, heard = int(os.environ["RANK"]), [], []
    out = Path(os.environ["CADRE_OUT"])
    if options.how != "after":
        # The script's own handler.
        signal.signal(signal.SIGTERM, lambda *_: heard.append(rank))
    cadre.init(cadre.Shape(2, 1, 8, ("causal",) * 2), steps=options.steps + options.more * rank)
    for step, batch in enumerate(cadre.batches(itertools.repeat([40]), list)):
        q, kv = (torch.randn(sum(batch), it, 8).requires_grad_() for it in (2, 1))
        bounds = torch.tensor([0, sum(batch)]).int()
        if step == options.at and rank == options.rank:
            ends(options.how, q)
        if step == options.at and rank == 0 and options.how == "interrupt":
            signal.signal(signal.SIGINT, lambda *_: hears(out))
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if step == 2 and options.how == "slow":
            away(out, is_longest=rank == options.rank)
        o = q
        for _ in range(2):
            o = cadre.flash_attn_varlen_func(o, kv, kv, bounds, bounds, 0, 0, causal=True)
        o.sum().backward()
        losses.append((o.detach().mean() + kv.grad.mean()).item())
        cadre.report(loss=losses[-1])
    cadre.finish()
    (out / f"losses-{rank}").write_text(json.dumps(losses))
    if options.how == "after" and rank == options.rank:
        os.kill(os.getpid(), signal.SIGTERM)
    if cadre.stopped():
        cadre.saved(len(losses), "somewhere")
        (out / f"saved-{rank}").write_text(json.dumps([len(losses), heard]))


main()
