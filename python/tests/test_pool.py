"""Jobs of `cadre run` whose ranks are Python: two ranks, two servers, real processes, one of them killed.

In: the folder of the programs as CADRE_PROGRAMS. Each rank checks its own results too; see rank.py.
"""

import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import cadre
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import pytorch_plain  # noqa: E402
from pytorch_books import packed  # noqa: E402
from pytorch_hybrid import documents, hybrid  # noqa: E402
from pytorch_models import llama  # noqa: E402

PROGRAM = Path(os.environ["CADRE_PROGRAMS"]) / "cadre"
TOKENS = 512


def manifest(
    *arguments: str,
    wire: str | None = "F32",
    program: str | list[str] = sys.executable,
    script: Path = HERE / "rank.py",
    servers: int = 2,
    nodes: int = 2,
    variables: dict[str, str] | None = None,
    **attention: object,
) -> str:
    """A job of rank.py, or of another script, of two ranks; `variables` are of their environment, `attention` is more
    of `spec.attention`. JSON is YAML."""

    def of(name: str, command: list[str], args: list[str], more: dict[str, str] | None = None) -> dict:
        # Ranks and servers share few processors, and some frameworks set torch's threads by it.
        told = {"OMP_NUM_THREADS": "1"} | (more or {})
        env = [{"name": name, "value": value} for name, value in told.items()]
        return {"spec": {"containers": [{"name": name, "command": command, "args": args, "env": env}]}}

    command = [*([program] if isinstance(program, str) else program), str(script)]
    pool = {
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "AttentionPool",
        "metadata": {"name": "pool"},
        "spec": {
            "replicas": servers,
            "inPlace": False,
            # Who is killed is found by its links; nobody is to be missed where the machine stands.
            "health": {"suspectAfterMilliseconds": 10000},
            "template": of("server", ["cadre", "serve"], ["--engine=cpu"]),
        },
    }
    job = {
        "apiVersion": "cadre.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "job"},
        "spec": {
            "nodes": nodes,
            "procsPerNode": 2 // nodes,
            "attention": {"poolRef": {"name": "pool"}, "wire": wire, "onPoolLoss": "Fail", "reproducible": True}
            | attention,
            "template": of("trainer", command, list(arguments), variables),
        },
    }
    return f"{json.dumps(pool)}\n---\n{json.dumps(job)}\n"


class RealProcesses(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.runs = Path(folder.name), 0

    def run_job(self, text: str, *options: str) -> tuple[int, str, Path]:
        """Exit code, stderr and the folder of results."""
        self.runs += 1
        out, file = self.folder / f"run-{self.runs}", self.folder / f"{self.runs}.yaml"
        file.write_text(text)
        command = [PROGRAM, "run", "-f", file, "--out", out, *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=600)
        self.lines = ended.stdout.splitlines()
        return ended.returncode, ended.stderr, out

    def complete(self, text: str, *options: str) -> Path:
        code, said, out = self.run_job(text, *options)
        logs = "\n".join(f"== {it.name}\n{it.read_text()}" for it in sorted(out.glob("logs/*")))
        self.assertEqual(code, 0, f"{said}\n{logs}")
        return out


def results(out: Path) -> list[dict[str, torch.Tensor]]:
    """By rank."""
    return [torch.load(out / f"rank-{it}.pt") for it in range(2)]


def losses(out: Path) -> list[str]:
    """The bits of each step's."""
    return [json.loads(it)["loss_bits"] for it in (out / "steps.jsonl").read_text().splitlines()]


def number(bits: str) -> float:
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def by_document(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Torch's attention on packed rows."""

    def one(*rows: torch.Tensor) -> torch.Tensor:
        rows = (it.transpose(0, 1) for it in rows)
        return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(0, 1)

    documents = zip(*(it.split(ends.diff().tolist()) for it in (q, k, v)), strict=True)
    return torch.cat([one(*it) for it in documents])


# Rounds of the calm run.
RECOMPUTES = ("none", "layer", "reentrant", "selective", "all")


class Ranks(RealProcesses):
    """Jobs of rank.py on three servers, of which two may be lost."""

    calm: list[dict[str, torch.Tensor]]
    out: Path

    @classmethod
    def setUpClass(cls) -> None:
        """The run that the others are compared with."""
        case = cls()
        case.setUp()
        cls.addClassCleanup(case.doCleanups)
        out = case.complete(manifest(f"--recompute={','.join(RECOMPUTES)}", "--exchange=auto", servers=3))
        cls.calm, cls.out = results(out), out

    def compare(self, out: Path, *, but: tuple[str, ...] = (), frozen: int = 0) -> None:
        """The first round has the bits of the calm run."""
        for expected, found in zip(self.calm, results(out), strict=True):
            for name in (it for it in expected if it.startswith("0.") and not any(part in it for part in but)):
                layer = int(name[-1])
                if ".d" in name and layer < frozen:
                    self.assertNotIn(name, found)
                else:
                    self.assertTrue(torch.equal(expected[name], found[name]), name)

    def test_results_have_the_bits_of_a_calm_run_whatever_server_dies(self) -> None:
        # Micro-batches, layers; O, LSE and three gradients.
        self.assertEqual([len(it) for it in self.calm], [len(RECOMPUTES) * 4 * 3 * 5] * 2)
        # Without a pool, keys pulled from their owners: all but the sums of dK and dV, whose parts a plan chooses.
        local = self.complete(manifest(servers=3), "--attention", "local")
        self.compare(local, but=(".dk", ".dv"))
        faults = ("--fault", "kill-server:0@1:fwd", "--fault", "kill-server:1@2:bwd")
        out = self.complete(manifest(servers=3), *faults)
        steps = [json.loads(it) for it in (out / "steps.jsonl").read_text().splitlines()]
        self.assertEqual([it["failovers"] for it in steps], [0, 1, 1])
        self.assertEqual([it["validation_loss"] for it in steps], [None, 1.5, 2.5])
        self.compare(out)

    def test_a_recompute_sends_nothing_and_changes_no_bit(self) -> None:
        rows = [json.loads(it) for it in (self.out / "servers.jsonl").read_text().splitlines()]
        sent = [0] * len(RECOMPUTES)
        for it in rows:
            sent[it["step"] // 3] += it["bytes_pulled"]
        self.assertGreater(sent[0], 0)
        self.assertEqual(sent, [sent[0]] * len(RECOMPUTES))
        for found in self.calm:
            for name, it in found.items():
                self.assertTrue(torch.equal(it, found["0" + name[1:]]), name)

    def test_layers_that_are_frozen_have_no_backward(self) -> None:
        both = ("--fault", "kill-server:0@1:fwd", "--fault", "kill-server:1@1:fwd")
        # One layer; all of them, a step that is forward alone.
        for frozen, faults in ((1, ("--fault", "kill-server:0@1:fwd")), (3, both)):
            # By the way that the job says, by its option or in its ranks' environment; they look at it.
            said, variables = (("--exchange=tcp",), None) if frozen == 1 else ((), {"CADRE_EXCHANGE": "tcp"})
            text = manifest(f"--frozen={frozen}", "--exchange=tcp", servers=3, variables=variables)
            self.compare(self.complete(text, *said, *faults), frozen=frozen)

    def test_rows_are_rounded_in_this_process_as_on_a_wire_of_bf16(self) -> None:
        self.complete(manifest("--dtype=float32,bfloat16", "--bound=2e-2", wire="Bf16"))

    def test_rows_travel_in_their_own_type_where_the_job_says_none(self) -> None:
        own = ("--dtype=bfloat16", "--bound=2e-2")
        self.complete(manifest(*own, "--rows=bfloat16,bfloat16", wire=None))
        code, said, _ = self.run_job(manifest(*own, "--rows=bfloat16,float32", wire=None))
        self.assertEqual(code, 2, said)
        self.assertIn("rank 1 joined with rows of F32, step 0 has Bf16 on the wire; give every rank the same", said)

    def test_an_exception_in_a_rank_ends_the_job_with_its_words(self) -> None:
        early = "0 of 3 forward phases and 0 of 3 backward phases were called"
        # An exception that nothing catches: `test_torchrun_numbers_the_ranks_of_its_nodes`.
        for end, expected, why in (("finish", 3, "ValueError: the loader broke"), ("early", 2, early)):
            code, said, _ = self.run_job(manifest(f"--break={end}"))
            self.assertEqual(code, expected, said)
            self.assertIn(f"rank 1, step 1: {why}", said)

    def test_micro_batches_in_flight_change_no_bit_and_what_is_not_finite_is_told(self) -> None:
        def run(end: str, *more: str) -> tuple[int, str, Path]:
            return self.run_job(manifest(f"--on-nonfinite={end}", script=HERE / "flight_rank.py"), *more)

        code, said, out = run("report", "--fault", "kill-server:0@1:bwd")
        logs = [it.read_text() for it in sorted(out.glob("logs/*trainer*"))]
        self.assertEqual(code, 0, "\n".join((said, *logs)))
        found = (
            "rank 1, step 5, layer 1, nano-batch 0, forward: O of layer 1 is not finite (task rows 0..40 of document"
        )
        self.assertEqual((said.count("is not finite"), said.count(found)), (1, 1), said)
        self.assertRegex(said, r"computed by server 1 .*It is passed on")
        self.assertEqual([it.count(found) for it in logs], [0, 1])
        code, said, _ = run("end")
        self.assertEqual(code, 3, said)
        self.assertIn(found, said)

    def test_two_micro_batches_at_once_train_to_the_bits_of_one_after_the_other(self) -> None:
        self.complete(manifest(script=HERE / "together_rank.py", servers=3), "--fault", "kill-server:0@4:bwd")

    def test_a_rank_may_have_no_documents_of_a_micro_batch(self) -> None:
        for turns, fault in ((1, "kill-server:0@1:fwd"), (2, "kill-server:1@2:bwd")):
            text = manifest(f"--turns={turns}", script=HERE / "sparse_rank.py")
            self.complete(text, "--fault", fault)

    def test_torchrun_numbers_the_ranks_of_its_nodes(self) -> None:
        # A torchrun a node, which meet.
        text = manifest(program="torchrun", servers=3)
        self.compare(self.complete(text, "--fault", "kill-server:0@1:bwd"))
        # One for two ranks.
        code, said, _ = self.run_job(manifest("--break=exit", program="torchrun", nodes=1))
        self.assertEqual(code, 3, said)
        self.assertIn("rank 1, step 1: ValueError: the loader broke", said)


class Transformers(RealProcesses):
    def without_cadre(self, script: str, options: tuple[str, ...]) -> list[float]:
        """The losses that it has with transformers' own attention."""
        with socket.create_server(("127.0.0.1", 0)) as it:
            port = str(it.getsockname()[1])
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, EXAMPLES / script, *options, "--attention=sdpa"]
        more = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        each = [os.environ | meet | {"RANK": str(it), "LOCAL_RANK": str(it)} for it in range(2)]
        ranks = [subprocess.Popen(command, env=it, **more) for it in each]
        said = [it.communicate(timeout=600)[0] for it in ranks]
        self.assertEqual([it.returncode for it in ranks], [0, 0], "\n".join(said))
        return [float(it) for it in re.findall(r"'loss': '?([0-9.e+-]+)", said[0])]

    def test_a_trainer_sums_gradients_with_the_same_bits_whatever_server_dies(self) -> None:
        # Each rank has 3 batches an epoch: an update of two, and one of the one that is left.
        options = ("--documents=24", "--longest=200", "--epochs=2", f"--out={self.folder}")
        text = manifest(*options, script=EXAMPLES / "pytorch_trainer.py")
        code, said, out = self.run_job(text)
        self.assertEqual(code, 0, said)
        calm = losses(out)
        # The job knows of the checkpoint of each epoch.
        for steps in (2, 4):
            self.assertIn(f"checkpoint of {steps} steps is at {self.folder}/checkpoint-{steps}", said)
        self.assertEqual(losses(self.complete(text, "--fault", "kill-server:1@2:bwd")), calm)
        theirs = self.without_cadre("pytorch_trainer.py", options)
        self.assertEqual(len(theirs), 4)
        for bits, loss in zip(calm, theirs, strict=True):
            self.assertLess(abs(number(bits) - loss) / loss, 1e-3)

    def test_packed_fine_tuning_of_trl_has_the_losses_of_its_own_attention(self) -> None:
        options = ("--documents=20", "--longest=200", f"--out={self.folder}")
        out = self.complete(manifest(*options, script=EXAMPLES / "pytorch_trl.py"), "--fault", "kill-server:0@1:fwd")
        theirs = self.without_cadre("pytorch_trl.py", options)
        self.assertGreater(len(theirs), 2)
        for bits, loss in zip(losses(out), theirs, strict=True):
            self.assertLess(abs(number(bits) - loss) / loss, 1e-3)

    def test_a_model_of_ones_own_trains_under_ddp_and_fsdp2(self) -> None:
        def run(sharding: str, *more: str) -> list[str]:
            (folder := self.folder / sharding).mkdir()
            options = (str(EXAMPLES / "pytorch_plain.py"), "--steps=3", "--tokens=256", f"--sharding={sharding}")
            return losses(self.complete(manifest(str(folder), *options, script=HERE / "first_update.py"), *more))

        calm = run("ddp")
        for one, other in zip(calm, run("fsdp2", "--fault", "kill-server:0@1:bwd"), strict=True):
            self.assertLess(abs(number(one) - number(other)) / number(one), 1e-4)
        # Torch's own attention, a document after the other, in one process.
        model, count = pytorch_plain.Model(by_document), pytorch_plain.ACCUMULATE
        first = sum(model(it) for rank in range(2) for it in itertools.islice(packed(rank, 256), count)) / 2 / count
        first.backward()
        self.assertLess(abs(number(calm[0]) - first.item()) / first.item(), 1e-6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for sharding, rank in itertools.product(("ddp", "fsdp2"), range(2)):
            _, gradients = torch.load(self.folder / sharding / f"update-{rank}.pt")
            for found, it in zip(gradients, model.parameters(), strict=True):
                far = (found - it.grad).abs().max() / it.grad.abs().max()
                self.assertLess(far, 1e-5, f"{sharding}, rank {rank}")

    def test_a_hybrid_trains_with_the_same_bits_whatever_server_dies(self) -> None:
        text = manifest("--steps=3", f"--tokens={TOKENS}", script=EXAMPLES / "pytorch_hybrid.py")
        calm = losses(self.complete(text))
        self.assertEqual(losses(self.complete(text, "--fault", "kill-server:0@1:bwd")), calm)
        batches, models = [next(documents(it, TOKENS)) for it in range(2)], [hybrid(it) for it in ("cadre", "sdpa")]
        self.assertEqual(cadre.Shape.of(models[0]).kinds, ("causal", "causal"))
        first = sum(models[1](**batch).loss for batch in batches) / 2
        self.assertLess(abs(first.item() - number(calm[0])) / number(calm[0]), 1e-6)

    def test_gradients_are_those_of_transformers_own_attention(self) -> None:
        batch = next(packed(0, TOKENS))
        self.assertEqual(cadre.Shape.of(qwen("cadre")).kinds, ("causal", "causal", "window:32", "window:32"))
        gemma_kinds = ("window:32 scale 0.125 softcap 20", "causal scale 0.125 softcap 20") * 2
        self.assertEqual(cadre.Shape.of(gemma("cadre")).kinds, gemma_kinds)
        self.assertEqual(cadre.Shape.of(gpt_oss("cadre")).kinds, ("window:32", "causal") * 2)
        for make, theirs in ((llama, "sdpa"), (qwen, "sdpa"), (gemma, "eager"), (gpt_oss, "eager")):
            gradients = []
            if make == gpt_oss:
                # This model's own attention lets packed documents see each other.
                ends = torch.tensor([0, TOKENS], dtype=torch.int32)
                batch |= {"position_ids": torch.arange(TOKENS)[None], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            for attention in ("cadre", theirs):
                model = make(attention)
                model(**batch).loss.backward()
                gradients.append({name: it.grad for name, it in model.named_parameters()})
            for name, it in gradients[1].items():
                self.assertLess((gradients[0][name] - it).abs().max() / it.abs().max(), 1e-5, f"{make}: {name}")


SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
    "sliding_window": 32,
}


def gemma(attention: str) -> Gemma2ForCausalLM:
    """Scores are capped, and scaled by another factor than the head dim's; each other layer has a window."""
    torch.manual_seed(1)
    scores = {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0}
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, **scores, attn_implementation=attention))


def gpt_oss(attention: str) -> GptOssForCausalLM:
    """Heads have sinks; each other layer has a window."""
    torch.manual_seed(1)
    config = GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=2, attn_implementation=attention)
    model = GptOssForCausalLM(config)
    for it in model.model.layers:
        torch.nn.init.normal_(it.self_attn.sinks)
    return model


def qwen(attention: str) -> Qwen2ForCausalLM:
    """Two layers of four have windows."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=2,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    unittest.main()
