"""Checkpoints of the reference trainer, read by transformers: the same loss on documents that were held out.

In: the folder of the programs as CADRE_PROGRAMS.
"""

import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

PROGRAM = Path(os.environ["CADRE_PROGRAMS"]) / "cadre"
CAP = 48
HELD = ["In the beginning God created the heaven and the earth.", "And the earth was without form, and void; " * 4]


def manifest(folder: Path, *more: str) -> str:
    """A job of `cadre train` without dedicated servers. JSON is YAML."""
    arguments = [f"--data={folder / 'data'}", f"--validate={folder / 'held.jsonl'}", "--model=tiny", "--steps=3"]
    arguments += ["--tokens=128", f"--cap={CAP}", "--validate-every=2", *more]
    container = {"name": "trainer", "command": ["cadre", "train"], "args": arguments}
    pool = {
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "AttentionPool",
        "metadata": {"name": "pool"},
        "spec": {"replicas": 0, "inPlace": True},
    }
    job = {
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job"},
        "spec": {"attention": {"poolRef": {"name": "pool"}}, "template": {"spec": {"containers": [container]}}},
    }
    return f"{json.dumps(pool)}\n---\n{json.dumps(job)}\n"


def loss_of(model: LlamaForCausalLM) -> float:
    """Mean over all bytes that have a successor, of pieces that see no others."""
    nats, targets = 0.0, 0
    for text in HELD:
        ids = torch.tensor(list(text.encode()))
        for start in range(0, len(ids) - 1, CAP):
            piece, wanted = ids[start : start + CAP], ids[start + 1 : start + CAP + 1]
            with torch.no_grad():
                logits = model(piece[None]).logits[0, : len(wanted)]
            nats += float(torch.nn.functional.cross_entropy(logits.double(), wanted, reduction="sum"))
            targets += len(wanted)
    return nats / targets


class Checkpoints(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "data").mkdir()
        (self.folder / "data" / "text").write_text("And God said, Let there be light: and there was light. " * 200)
        (self.folder / "held.jsonl").write_text("".join(json.dumps({"text": it}) + "\n" for it in HELD))

    def train(self, name: str, *more: str) -> tuple[Path, str]:
        file, out = self.folder / f"{name}.yaml", self.folder / name
        file.write_text(manifest(self.folder, *more))
        ended = subprocess.run([PROGRAM, "run", "-f", file, "--out", out], capture_output=True, text=True, check=False)
        logs = "\n".join(it.read_text() for it in sorted(out.glob("logs/*")))
        self.assertEqual(ended.returncode, 0, f"{ended.stderr}\n{logs}")
        return out, ended.stderr

    def test_transformers_loads_a_llama_that_has_the_same_loss(self) -> None:
        for name, more in (
            ("preset", ()),
            ("sizes", ("--query-heads=4", "--kv-heads=2", "--head-dim=24", "--depth=3")),
        ):
            out, _ = self.train(name, *more)
            steps = [json.loads(it)["validation_loss"] for it in (out / "steps.jsonl").read_text().splitlines()]
            self.assertEqual([it is None for it in steps], [True, False, False])
            model, told = AutoModelForCausalLM.from_pretrained(
                out / "checkpoints" / "step-3", attn_implementation="sdpa", output_loading_info=True
            )
            self.assertIsInstance(model, LlamaForCausalLM)
            self.assertFalse(any(told.values()), told)
            found = loss_of(model)
            self.assertLess(abs(found - steps[-1]), 1e-5, f"{name}: transformers {found}, Cadre {steps[-1]}")

    def test_what_no_llama_can_be_is_not_called_one(self) -> None:
        near = "layer 1 is window:16 heads 2/1 dim 32, and all layers of a Llama are causal"
        for name, option, why in (
            ("window", "--layers=full,window:16", near),
            ("heads", "--query-heads=3", "its width 64 is no multiple of its 3 query heads"),
        ):
            out, said = self.train(name, option)
            self.assertIn(f"with no config.json: {why}", said)
            self.assertFalse((out / "checkpoints" / "step-3" / "config.json").exists())
            with self.assertRaises((OSError, ValueError)):
                AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "step-3")


if __name__ == "__main__":
    unittest.main()
