"""Adapters of frameworks that bring their own models: Megatron-core and torchtitan, each by its example's script.

In: the folder of the programs as CADRE_PROGRAMS. Their trainers ask for a GPU, so the scripts have loops of their own.
"""

import json
import sys
import unittest
import warnings
from typing import Any
from unittest import mock

import cadre
import torch
import torch.distributed as dist
from cadre import _attention
from test_pool import EXAMPLES, HERE, RealProcesses, by_document, losses, manifest, number
from test_transformers import by_number
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(EXAMPLES))
with warnings.catch_warnings():
    # What is optional, and not there.
    warnings.simplefilter("ignore")
    import pytorch_megatron
    import pytorch_torchtitan
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.enums import AttnMaskType
    from pytorch_books import packed
    from pytorch_hybrid import documents
    from torchtitan_rank import prepare

TOKENS = 256


class PlainMegatron(torch.nn.Module):
    """Torch's own attention, `[rows, batch, heads, dim]`."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (it.permute(1, 2, 0, 3) for it in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.permute(2, 0, 1, 3).flatten(2)


class Mixer(torch.nn.Module):
    """In the place of a layer without attention, which asks for kernels of GPUs."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states.cumsum(0)


class Frameworks(RealProcesses):
    def check(self, script: str, model: Any, loss_of: Any, batches: list[Any]) -> None:
        """The first loss and gradients of the job's two ranks are those of the model, whatever server dies."""
        first = sum(loss_of(model, batch) for batch in batches) / len(batches)
        first.backward()
        options = (str(self.folder), str(EXAMPLES / script), "--steps=2", f"--tokens={TOKENS}")
        text = manifest(*options, script=HERE / "first_update.py")
        found = losses(self.complete(text, "--fault", "kill-server:0@0:bwd"))
        self.assertEqual(len(found), 2)
        self.assertLess(abs(number(found[0]) - first.item()) / first.item(), 1e-6)
        for rank in range(2):
            _, gradients = torch.load(self.folder / f"update-{rank}.pt")
            for (name, it), one in zip(model.named_parameters(), gradients, strict=True):
                self.assertLess((one - it.grad).abs().max() / it.grad.abs().max(), 1e-5, f"rank {rank}: {name}")

    def test_a_gpt_of_megatron_learns_the_same(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        self.addCleanup(parallel_state.destroy_model_parallel)
        model = pytorch_megatron.gpt(pytorch_megatron.layer(PlainMegatron), TOKENS)
        loaders = [documents(rank, TOKENS) for rank in range(2)]
        batches = [next(it) for it in loaders for _ in range(pytorch_megatron.ACCUMULATE)]
        self.check("pytorch_megatron.py", model, pytorch_megatron.loss_of, batches)

    def test_layers_of_a_hybrid_of_megatron_are_those_that_have_attention(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        self.addCleanup(parallel_state.destroy_model_parallel)
        config = pytorch_megatron.configuration()
        config.num_layers, config.is_hybrid_model = 5, True
        with self.assertRaisesRegex(NotImplementedError, "is_hybrid_model is True: .* give the model in its place"):
            cadre.megatron.shape(config)
        attention = get_gpt_layer_local_spec(normalization="RMSNorm")
        kinds = MambaStackSubmodules(mamba_layer=Mixer, attention_layer=attention, mlp_layer=Mixer)
        spec = cadre.megatron.put_into(ModuleSpec(MambaStack, submodules=kinds))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        how = {"hybrid_override_pattern": "M*-M*", "post_layer_norm": False, "pg_collection": groups}
        stack = MambaStack(config, spec.submodules, **how)
        shape = cadre.megatron.shape(stack)
        self.assertEqual((shape.kinds, shape.heads), (("causal",) * 2, ((4, 2, 16),) * 2))
        found = [int(it.layer) for it in stack.modules() if isinstance(it, cadre.megatron.CoreAttention)]
        self.assertEqual(found, [0, 1])
        # In the order in which it calls them.
        with mock.patch.object(cadre.megatron, "attend", wraps=cadre.megatron.attend) as calls:
            stack(torch.randn(6, 1, 64), None)
        self.assertEqual([int(it.kwargs["layer"]) for it in calls.call_args_list], [0, 1])
        with self.assertRaisesRegex(TypeError, "Linear has no layer with cadre.megatron.CoreAttention"):
            cadre.megatron.shape(torch.nn.Linear(1, 1))

    def observed(self, model: Any, shape: cadre.Shape, loss_of: Any, batches: list[Any]) -> list[list[list[int]]]:
        """The documents that `cadre.observe` sees, by step and forward, in a job that uses nothing else of Cadre."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        observer = cadre.observe(model, self.folder, shape=shape, ranks=(0, 1))
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
        observer.close()
        head, *steps = (json.loads(it) for it in (self.folder / "rank-0.jsonl").read_text().splitlines())
        self.assertEqual(head["layers"], list(shape.kinds))
        return [it["documents"] for it in steps]

    def test_a_gpt_of_megatron_is_observed(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        self.addCleanup(parallel_state.destroy_model_parallel)
        model, loader = pytorch_megatron.gpt(pytorch_megatron.layer(PlainMegatron), TOKENS), documents(0, TOKENS)
        batches, shape = [next(loader) for _ in range(3)], cadre.megatron.shape(pytorch_megatron.configuration())
        found = self.observed(model, shape, pytorch_megatron.loss_of, batches)
        self.assertEqual(found, [[pytorch_megatron.lengths(it)] for it in batches])

    def test_a_llama_of_torchtitan_is_observed(self) -> None:
        config = pytorch_torchtitan.configuration("cadre.torchtitan.attention")
        batches = [next(packed(rank, TOKENS)) for rank in range(3)]
        model, shape = pytorch_torchtitan.llama(config), cadre.torchtitan.shape(config)
        found = self.observed(model, shape, pytorch_torchtitan.loss_of, batches)
        self.assertEqual(found, [[it["cu_seq_lens_q"].diff().tolist()] for it in batches])
        self.assertGreater(len(found[0][0]), 1)

    def test_megatron_is_refused_what_is_not_there_by_its_name(self) -> None:
        config = pytorch_megatron.configuration()
        make = cadre.megatron.CoreAttention
        kind = AttnMaskType.causal
        for name, value in (
            ("tensor_model_parallel_size", 2),
            ("pipeline_model_parallel_size", 2),
            ("context_parallel_size", 2),
            ("attention_dropout", 0.1),
            ("softmax_type", "learnable"),
            ("window_size", (4, 0)),
            ("hybrid_context_parallel", True),
            # Of later versions.
            ("dynamic_context_parallel", True),
            ("sequence_packing_scheduler", "dp_balanced"),
        ):
            changed = mock.patch.object(config, name, value, create=True)
            with changed, self.assertRaisesRegex(NotImplementedError, f"{name} is .*set it to"):
                make(config, 1, kind, "self")
        latent = mock.Mock(wraps=config, multi_latent_attention=True, qk_head_dim=128, qk_pos_emb_head_dim=64)
        latent.v_head_dim = 128
        words = "multi_latent_attention: heads of v are 128 wide and those of q 192: .* their own attention"
        with self.assertRaisesRegex(NotImplementedError, words):
            cadre.megatron.check(latent)
        with self.assertRaisesRegex(NotImplementedError, "attention_type is cross"):
            make(config, 1, kind, "cross")
        q = torch.randn(4, 1, 4, 16)
        with self.assertRaisesRegex(NotImplementedError, "attn_mask_type is .*arbitrary"):
            make(config, 1, AttnMaskType.arbitrary, "self")(q, q[:, :, :2], q[:, :, :2])
        # A mask of two documents in a row would be left out silently.
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
        apart = causal.clone()
        apart[..., 2:, :2] = True
        make(config, 1, kind, "self")(q, q[:, :, :2], q[:, :, :2], causal)
        with self.assertRaisesRegex(RuntimeError, "attention_mask hides other keys"):
            make(config, 1, kind, "self")(q, q[:, :, :2], q[:, :, :2], apart)
        with self.assertRaisesRegex(NotImplementedError, "attention_mask .* beside a causal layer"):
            make(config, 1, AttnMaskType.padding_causal, "self")(q, q[:, :, :2], q[:, :, :2], causal[..., :1, :])
        with self.assertRaisesRegex(ValueError, "packed rows without packed_seq_params"):
            make(config, 1, kind, "self")(q[:, 0], q[:, 0, :2], q[:, 0, :2])
        own, other = (torch.tensor(it, dtype=torch.int32) for it in ([0, 1, 4], [0, 2, 4]))
        apart = PackedSeqParams(qkv_format="thd", cu_seqlens_q=own, cu_seqlens_kv=other)
        with self.assertRaisesRegex(NotImplementedError, "cu_seqlens_q and cu_seqlens_k differ"):
            make(config, 1, kind, "self")(q[:, 0], q[:, 0, :2], q[:, 0, :2], packed_seq_params=apart)
        padded = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=own, cu_seqlens_kv=own)
        with self.assertRaisesRegex(NotImplementedError, "packed_seq_params of qkv_format sbhd"):
            make(config, 1, kind, "self")(q, q[:, :, :2], q[:, :, :2], packed_seq_params=padded)

    def test_a_mask_of_megatron_is_looked_at_once(self) -> None:
        config, q = pytorch_megatron.configuration(), torch.randn(4, 1, 4, 16)
        layers = [cadre.megatron.CoreAttention(config, it, AttnMaskType.causal, "self") for it in (1, 2)]
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
        with mock.patch.object(cadre.megatron, "_check_mask", wraps=cadre.megatron._check_mask) as looks:
            for it in layers * 2:
                it(q, q[:, :, :2], q[:, :, :2], mask)
            self.assertEqual(looks.call_count, 1)
            layers[0](q, q[:, :, :2], q[:, :, :2], mask.clone())
            self.assertEqual(looks.call_count, 2)
            # Whose numbers change afterwards.
            layers[0](q, q[:, :, :2], q[:, :, :2], mask)
            mask[..., 3, 0] = True
            with self.assertRaisesRegex(RuntimeError, "attention_mask hides other keys"):
                layers[1](q, q[:, :, :2], q[:, :, :2], mask)
        with torch.inference_mode():
            mask = torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None]
            layers[0](q, q[:, :, :2], q[:, :, :2], mask)
            mask[..., 3, 0] = True
            with self.assertRaisesRegex(RuntimeError, "attention_mask hides other keys"):
                layers[1](q, q[:, :, :2], q[:, :, :2], mask)

    def test_the_last_rows_of_a_long_mask_are_looked_at(self) -> None:
        rows = 1100
        mask = torch.ones(rows, rows, dtype=torch.bool).triu(1)[None, None]
        cadre.megatron._check_mask(mask, rows, packed=False)
        for row, key in ((1099, 0), (1023, 1024), (1024, 1024), (0, 0)):
            other = mask.clone()
            other[..., row, key] ^= True
            with self.assertRaisesRegex(RuntimeError, "attention_mask hides other keys"):
                cadre.megatron._check_mask(other, rows, packed=False)

    def test_rows_that_are_divided_among_ranks_are_refused_by_their_name(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        q = distribute_tensor(torch.randn(4, 2, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
        ends = torch.tensor([0, 4])
        with self.assertRaisesRegex(NotImplementedError, "q is a DTensor over several ranks: tensor and context"):
            cadre.flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, causal=True)

    def test_a_llama_of_torchtitan_learns_the_same(self) -> None:
        def plain(q, k, v, *, attention_masks, **_):
            return by_document(q[0], k[0], v[0], attention_masks.cu_seq_q)[None]

        model = pytorch_torchtitan.llama(pytorch_torchtitan.configuration())
        for it in model.layers.values():
            it.attention.inner_attention.forward = plain
        batches = [next(packed(rank, TOKENS)) for rank in range(2)]
        self.check("pytorch_torchtitan.py", model, pytorch_torchtitan.loss_of, batches)

    def titan(self, what: str = "plain") -> torch.nn.Module:
        config = pytorch_torchtitan.configuration("cadre.torchtitan.attention")
        cadre.torchtitan.shape(config)
        return prepare(pytorch_torchtitan.llama(config), what)

    def test_layers_of_torchtitan_have_their_numbers_in_tensors(self) -> None:
        def numbers(model: torch.nn.Module) -> list[torch.Tensor | None]:
            return [it.layer for it in model.modules() if isinstance(it, cadre.torchtitan.Attention)]

        config = pytorch_torchtitan.configuration("cadre.torchtitan.attention")
        # Layers may share their configuration.
        config.layers[1] = config.layers[0]
        model = pytorch_torchtitan.llama(config)
        self.assertEqual(numbers(model), [None, None])
        shape = cadre.torchtitan.shape(model)
        self.assertEqual([int(it) for it in numbers(prepare(model, "full"))], [0, 1])
        self.assertEqual(cadre.torchtitan.shape(config), shape)
        with torch.device("meta"):
            found = numbers(config.build())
        self.assertEqual([(int(it), it.device.type, it.dim()) for it in found], [(0, "cpu", 0), (1, "cpu", 0)])

    @torch._dynamo.config.patch()
    @torch._functorch.config.patch()
    def test_blocks_of_torchtitan_are_computed_again_and_compiled_without_a_job(self) -> None:
        self.addCleanup(torch._C._dynamo.eval_frame._set_lru_cache, True)
        batch = next(packed(0, TOKENS))

        def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
            torch._dynamo.reset()
            counters.clear()
            pytorch_torchtitan.loss_of(model, batch).backward()
            return [it.grad for it in model.parameters()]

        for plain, others in (("plain", ("full", "selective", "together+full")), ("compiled", ("full+compiled",))):
            expected = gradients(self.titan(plain))
            for it in others:
                with mock.patch.object(_attention, "_forward", wraps=_attention._forward) as calls:
                    found = gradients(self.titan(it))
                # Each of the two layers is called again.
                self.assertEqual(calls.call_count, 4, it)
                for one, other in zip(found, expected, strict=True):
                    self.assertTrue(torch.equal(one, other), it)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        # What a tensor is there for.
        model = self.titan()
        for at, it in enumerate(model.layers.values()):
            it.attention.inner_attention.layer = at
        with mock.patch.object(cadre.torchtitan, "attend", by_number):
            gradients(prepare(model, "compiled"))
        self.assertEqual(counters["stats"]["unique_graphs"], 2)


if __name__ == "__main__":
    unittest.main()
