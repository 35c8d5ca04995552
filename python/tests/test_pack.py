"""`cadre.pack`: what ranks hold, put together, is what one rank holds of the same documents; so is what is learnt.

In: the folder of the programs as CADRE_PROGRAMS, for a job of two ranks; CADRE_TREE_SEED, of which half of the cases
are drawn.
"""

import itertools
import os
import pickle
import random
import re
import subprocess
import sys
import unittest
import zlib

import cadre
import packed_rank
import torch
from alone import Alone
from pytorch_packed import Packed
from test_pool import EXAMPLES, HERE, RealProcesses, by_document, losses, manifest, number
from torch import Tensor
from torch.utils.data import default_collate

# Half of them are new with every commit.
OF_TREE = zlib.crc32(os.environ.get("CADRE_TREE_SEED", "no tree").encode())
SEEDS = [*range(4), *range(OF_TREE, OF_TREE + 4)]


class Packs(Alone):
    def test_ranks_together_hold_what_one_rank_holds(self) -> None:
        for seed in (it for base in (0, OF_TREE) for it in range(base, base + 50)):
            draw = random.Random(seed)
            documents, _ = packed_rank.drawn(seed)
            for at, it in enumerate(documents):
                it["speaker"] = torch.full((len(it["input_ids"]), 2), at)
            rows = sum(len(it["input_ids"]) for it in documents)
            ranks = draw.randint(1, min(rows, 7))
            edges = [0, *sorted(draw.sample(range(1, rows), ranks - 1)), rows]
            shares = draw.choice((None, [end - start for start, end in itertools.pairwise(edges)]))
            parts = [cadre.pack(documents, rows=shares, rank=it, ranks=ranks) for it in range(ranks)]
            whole = cadre.pack(documents, rank=0, ranks=1)
            with self.subTest(seed=seed, ranks=ranks, rows=shares):
                for name in ("input_ids", "position_ids", "shift_labels", "loss_weights"):
                    found = torch.cat([getattr(it, name) for it in parts], 1)
                    self.assertTrue(torch.equal(found, getattr(whole, name)), name)
                self.assertTrue(torch.equal(torch.cat([it.more["speaker"] for it in parts]), whole.more["speaker"]))
                # Each part of a document continues the one before it.
                ends = {}
                for it in (it for part in parts for it in part.layout):
                    self.assertEqual(
                        (it.start, it.rows), (ends.get(it.document, 0), len(documents[it.document]["labels"]))
                    )
                    ends[it.document] = it.end
                self.assertEqual(ends, {at: len(it["labels"]) for at, it in enumerate(documents)})
                for it in parts:
                    self.assertEqual(it.cu_seqlens.diff().tolist(), [one.end - one.start for one in it.layout])
                    self.assertEqual(it.targets, int((whole.shift_labels != -100).sum()))
                    self.assertEqual(it.inputs()["shift_labels"].shape, it.input_ids.shape)

    def test_a_label_is_the_next_token_of_its_document_and_weights_add_up_to_one(self) -> None:
        it = cadre.pack([[5, 6, 7], [8], [9, 1]], rank=0, ranks=1)
        self.assertEqual(it.shift_labels.tolist(), [[6, 7, -100, -100, 1, -100]])
        self.assertEqual(it.position_ids.tolist(), [[0, 1, 2, 0, 0, 1]])
        torch.testing.assert_close(it.loss_weights, torch.tensor([[1, 1, 0, 0, 1, 0]]) / 3)
        self.assertEqual(it.targets, 3)
        # Of an update of two micro-batches.
        half = cadre.pack([[5, 6, 7]], total=4, rank=0, ranks=1)
        self.assertEqual(half.loss_weights.sum(), 0.5)
        # Nothing to learn.
        self.assertEqual(cadre.pack([[5], [6]], rank=1, ranks=2).loss_weights.tolist(), [[0]])

    def test_what_cannot_be_packed_is_refused(self) -> None:
        def refused(words: str, documents: list, **more: object) -> None:
            with self.assertRaisesRegex(ValueError, words):
                cadre.pack(documents, **({"rank": 0, "ranks": 2} | more))

        refused("there is no document", [])
        refused(r"document 1 is \(0,\)", [[1, 2], torch.zeros(0).long()])
        refused("of torch.float32; give 1 token", [[0.5, 1.0]])
        refused("1 rows, of which ranks hold", [[1]])
        refused("3 rows, of which ranks hold", [[1, 2, 3]], rows=[1, 3])
        refused("3 rows, of which ranks hold", [[1, 2, 3]], rows=[0, 3])
        refused("document 0 has .* and no input_ids", [{"labels": [1]}])
        refused("labels of document 0 is", [{"input_ids": [1, 2], "labels": [1]}])
        refused("document 1 has .*; give all the same fields", [{"input_ids": [1], "speaker": [1]}, [1]])
        refused("one loss weight of 0 or more", [{"input_ids": [1, 2], "loss_weights": [1.0, -1.0]}])
        refused("divided by 0", [[1, 2]], total=0)
        refused("rank 2 of 2", [[1, 2]], rank=2)
        refused("give both, or none", [[1, 2]], ranks=None)
        with self.assertRaisesRegex(ValueError, "logits of 1 rows, and the rank holds 2"):
            cadre.pack([[1, 2]], rank=0, ranks=1).loss(torch.zeros(1, 8))

    def test_parts_of_documents_are_refused_where_their_keys_are_not(self) -> None:
        q = torch.randn(2, 2, 8)
        ends = cadre.pack([[1, 2, 3]], rows=[2, 1], rank=0, ranks=2).cu_seqlens

        def call(ends: Tensor) -> Tensor:
            return cadre.flash_attn_varlen_func(q, q, q, ends, ends, 2, 2, causal=True)

        collated = default_collate([{"cu_seq_lens_q": ends}])["cu_seq_lens_q"][0]
        moved = pickle.loads(pickle.dumps(ends))
        # What loaders, collators and moves to a GPU make of it.
        for it in (ends, ends.clone(), ends.long(), torch.tensor(ends.tolist()), collated, moved):
            with self.assertRaisesRegex(ValueError, "goes on in another rank"), cadre.local():
                call(it)
        with self.assertRaisesRegex(ValueError, "goes on in another rank"):
            call(ends.clone())
        # Others may be as long.
        with cadre.local(whole=True), cadre.local():
            self.assertEqual(call(ends.clone()).shape, q.shape)
        with cadre.local():
            call(torch.tensor([0, 1, 2]))

    def test_parts_that_another_process_has_packed_are_known_from_their_step(self) -> None:
        q, ends = torch.randn(7, 2, 8), torch.tensor([0, 3, 7])
        self.join()
        cadre.begin_step([3, 4], next=[cadre.Stretch(0, 3, 0, 3), cadre.Stretch(1, 9, 0, 4)])
        with self.assertRaisesRegex(ValueError, "step 0: .* goes on in another rank"), cadre.local():
            cadre.flash_attn_varlen_func(q, q, q, ends, ends, 7, 7, causal=True)


class Jobs(RealProcesses):
    def test_losses_and_gradients_of_ranks_add_up_to_those_of_whole_documents(self) -> None:
        out = self.complete(manifest(*(str(it) for it in SEEDS), script=HERE / "packed_rank.py"))
        ranks = [torch.load(out / f"packed-{it}.pt") for it in range(2)]
        model = Packed(by_document)
        for step, seed in enumerate(SEEDS):
            whole = cadre.pack(packed_rank.drawn(seed)[0], rank=0, ranks=1)
            loss = whole.loss(model(whole))
            model.zero_grad()
            loss.backward()
            found = sum(it[step][0] for it in ranks)
            self.assertLess(abs(found - loss.item()), 1e-6 * max(loss.item(), 1), f"seed {seed}")
            for place, it in enumerate(model.parameters()):
                both: Tensor = sum(of[step][1][place] for of in ranks)
                self.assertLessEqual((both - it.grad).abs().max(), 1e-5 * it.grad.abs().max() + 1e-12, f"seed {seed}")

    def test_the_example_has_the_losses_of_one_rank(self) -> None:
        options = ("--steps=3", "--rows=512")
        out = self.complete(manifest(*options, script=EXAMPLES / "pytorch_packed.py"), "--fault", "kill-server:0@1:bwd")
        command = [sys.executable, EXAMPLES / "pytorch_packed.py", *options]
        alone = subprocess.run(command, capture_output=True, text=True, check=True)
        told = [float(it) for it in re.findall(r"^loss ([0-9.]+)", alone.stdout, re.MULTILINE)]
        self.assertEqual(len(told), 3)
        for bits, loss in zip(losses(out), told, strict=True):
            self.assertLess(abs(number(bits) - loss) / loss, 1e-4)


if __name__ == "__main__":
    unittest.main()
