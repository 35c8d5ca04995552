"""The first update of a job beside that of the model's own attention: its loss within 1e-6, its gradients within 1e-5.

In: the folder of the programs as CADRE_PROGRAMS. Two ranks, two servers, of which one is killed; the examples' scripts.
"""

import json
import unittest
from pathlib import Path
from typing import Any

import test_pool
import torch
from pytorch_books import packed
from pytorch_hybrid import documents, hybrid
from pytorch_models import MODELS
from test_pool import EXAMPLES, HERE, RealProcesses, losses, manifest

TOKENS = 256
Update = tuple[float, list[torch.Tensor]]
"""A rank's loss, and gradients."""


class FirstUpdates(RealProcesses):
    def found(self, script: str, *options: str) -> list[Update]:
        """By rank, of a job."""
        folder = self.room("job")
        text = manifest(str(folder), str(EXAMPLES / script), *options, script=HERE / "first_update.py")
        self.complete(text, "--fault", "kill-server:0@0:bwd")
        return [torch.load(folder / f"update-{it}.pt") for it in range(2)]

    def without_cadre(self, script: str, *options: str) -> list[Update]:
        """By rank, with transformers' own attention."""
        folder = self.room("own")
        arguments = (str(folder), str(EXAMPLES / script), *options)
        test_pool.Transformers.without_cadre(self, str(HERE / "first_update.py"), arguments)
        return [torch.load(folder / f"update-{it}.pt") for it in range(2)]

    def room(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def alike(self, found: Update, expected: Update) -> None:
        self.assertLess(abs(found[0] - expected[0]) / expected[0], 1e-6)
        for at, (one, other) in enumerate(zip(found[1], expected[1], strict=True)):
            self.assertLess(far(one, other), 1e-5, f"parameter {at}")

    def check_model(self, name: str, *options: str) -> None:
        model = MODELS[name]("eager")
        losses = [loss_of(model, next(packed(rank, TOKENS))) for rank in range(2)]
        (sum(losses) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = [it.grad for it in model.parameters()]
        for loss, it in zip(losses, self.found("pytorch_llama.py", f"--model={name}", *SMALL, *options), strict=True):
            self.alike(it, (loss.item(), gradients))

    def test_examples_are_short(self) -> None:
        for it in EXAMPLES.glob("*.py"):
            self.assertLess(len(it.read_text().splitlines()), 120, it.name)

    def test_a_llama(self) -> None:
        self.check_model("llama")

    def test_a_llama_whose_layers_are_compiled(self) -> None:
        # Which are recomputed in the backward, too.
        self.check_model("llama", "--compile=aot_eager", "--checkpointing")

    def test_a_qwen_with_windows(self) -> None:
        self.check_model("qwen")

    def test_a_gpt_oss_with_sinks(self) -> None:
        self.check_model("gpt-oss")

    def test_a_hybrid_whose_decays_are_as_far_from_f64_as_transformers_own(self) -> None:
        batches = [next(documents(rank, TOKENS)) for rank in range(2)]
        names = [name for name, _ in hybrid("sdpa").named_parameters()]

        def update(model: torch.nn.Module) -> tuple[list[float], list[torch.Tensor]]:
            losses = [model(**it).loss for it in batches]
            (sum(losses) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return [it.item() for it in losses], [it.grad for it in model.parameters()]

        def parts(gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            """Those of decays, and all others."""
            named = list(zip(names, gradients, strict=True))
            are = [[it for name, it in named if name.endswith(DECAYS) == decays] for decays in (True, False)]
            return are[0], are[1]

        (losses, own), (_, exact) = update(hybrid("sdpa")), update(hybrid("sdpa").double())
        (decays, others), (decays_in_f64, _) = parts(own), parts(exact)
        # Of each of the six linear layers.
        self.assertEqual(len(decays), 18)
        most = 2 * max(map(far, decays, decays_in_f64))
        jobs = self.found("pytorch_hybrid.py", "--steps=1", f"--tokens={TOKENS}")
        for loss, (found, gradients) in zip(losses, jobs, strict=True):
            of_decays, of_others = parts(gradients)
            self.alike((found, of_others), (loss, others))
            self.assertLess(max(map(far, of_decays, decays_in_f64)), most)

    def check_script(self, script: str, *options: str) -> None:
        options = (*options, "--longest=200", f"--out={self.folder}")
        for found, expected in zip(self.found(script, *options), self.without_cadre(script, *options), strict=True):
            self.alike(found, expected)

    def test_a_trainer(self) -> None:
        self.check_script("pytorch_trainer.py", "--documents=16", "--epochs=1")

    def test_a_trainer_of_trl(self) -> None:
        self.check_script("pytorch_trl.py", "--documents=12")


class Recomputes(RealProcesses):
    def losses_and_bytes(self, script: Path, *options: str) -> tuple[list[str], int]:
        """Of a job's steps, and what its servers have pulled."""
        out = self.complete(manifest(*options, "--steps=2", f"--tokens={TOKENS}", script=script))
        servers = [json.loads(it) for it in (out / "servers.jsonl").read_text().splitlines()]
        pulled = sum(it["bytes_pulled"] for it in servers)
        self.assertGreater(pulled, 0)
        return losses(out), pulled

    def test_a_recompute_of_megatrons_sends_nothing_and_changes_no_bit(self) -> None:
        calm = self.losses_and_bytes(EXAMPLES / "pytorch_megatron.py")
        for kind in ("full", "uniform", "selective"):
            self.assertEqual(self.losses_and_bytes(HERE / "megatron_rank.py", kind), calm, kind)

    def test_a_recompute_of_torchtitans_sends_nothing_and_changes_no_bit(self) -> None:
        for plain, others in (
            ("plain", ("together+full",)),
            ("compiled", ("selective+compiled", "budget+compiled")),
        ):
            calm = self.losses_and_bytes(HERE / "torchtitan_rank.py", plain)
            for it in others:
                self.assertEqual(self.losses_and_bytes(HERE / "torchtitan_rank.py", it), calm, it)


# What makes the decays of linear layers. In f32 their gradients are far off, whoever computes attention.
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight")
SMALL = ("--steps=1", f"--tokens={TOKENS}", "--whole")


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far they are from each other, of the largest."""
    return float((one - other).abs().max() / other.abs().max())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a batch, a document after the other: some attention of transformers lets packed documents see each other."""
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    documents = zip(batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True)
    parts = [
        model(input_ids=ids, labels=labels).loss * (ids.shape[1] - 1) for ids, labels in documents if ids.numel() > 1
    ]
    return sum(parts) / sum(it - 1 for it in lengths)


if __name__ == "__main__":
    unittest.main()
