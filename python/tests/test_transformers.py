"""The adapter of transformers without a job: what it refuses, and the shapes it reads."""

import dataclasses
import unittest
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cadre.transformers
import torch
import torch.distributed as dist
from cadre import Kind, Shape, _frozen
from cadre._attention import attend
from cadre._layout import name_layers
from cadre._observe import layers_of
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5Model,
)
from transformers.masking_utils import create_causal_mask

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
    "attn_implementation": "cadre",
}
TOKENS = torch.arange(64).view(2, 32)
TWICE = torch.arange(16).repeat(2)[None]


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**(SMALL | more)))


def call(module: object = None, **more: Any) -> torch.Tensor:
    q = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    return cadre.transformers.attention(module, q, q, q, None, **more)[0]


def own_row(_batch: Any, _head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return row == key


class Arguments(unittest.TestCase):
    def test_an_argument_that_nobody_knows_is_refused_by_its_name(self) -> None:
        for name in ("position_bias", "indices", "block_indices", "sinks", "head_mask", "cache"):
            with self.assertRaisesRegex(NotImplementedError, f"{name} is a tensor"):
                call(**{name: torch.zeros(1)})
            call(**{name: None})
        for name in ("temperature", "dropout"):
            with self.assertRaisesRegex(NotImplementedError, f"{name} is 0.5"):
                call(**{name: 0.5})
        call(position_ids=torch.zeros(1), max_length_q=5, output_attentions=False, num_items_in_batch=torch.tensor(3))

    def test_keys_of_a_cache_are_refused(self) -> None:
        q = torch.randn(1, 2, 4, 8)
        with self.assertRaisesRegex(NotImplementedError, "q has 1 rows and K 4: keys of a cache .* use_cache=False"):
            cadre.transformers.attention(None, q[:, :, :1], q, q, None)

    def test_a_t5_is_refused_for_the_bias_of_its_positions(self) -> None:
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0)
        config._attn_implementation = "cadre"
        with self.assertRaisesRegex(NotImplementedError, "position_bias is a tensor"):
            T5Model(config)(input_ids=TOKENS, decoder_input_ids=TOKENS)

    def test_heads_of_other_widths_are_refused_by_the_widths(self) -> None:
        q = torch.randn(1, 2, 5, 16)
        with self.assertRaisesRegex(NotImplementedError, "heads of v are 8 wide and those of q 16: all three are"):
            cadre.transformers.attention(None, q, q, q[..., :8], None)
        latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 8}
        small = SMALL | {"num_key_value_heads": 4, "first_k_dense_replace": 2}
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**small, **latent))
        with self.assertRaisesRegex(NotImplementedError, "init: heads of v are 8 wide and those of q 16: all three"):
            Shape.of(model)
        with self.assertRaisesRegex(NotImplementedError, "heads of v are 8 wide and those of q 16: all three are"):
            model(TOKENS)
        # Of one width they are as any others.
        same = DeepseekV3ForCausalLM(DeepseekV3Config(**small, **latent | {"v_head_dim": 16})).eval()
        shape = Shape.of(same)
        self.assertEqual((shape.kinds, shape.heads), (("causal",) * 2, ((4, 4, 16),) * 2))
        with torch.no_grad():
            found = same(TOKENS).logits
            same.set_attn_implementation("eager")
            self.assertLess((same(TOKENS).logits - found).abs().max(), 1e-5)

    def test_a_window_that_looks_both_ways_is_refused(self) -> None:
        for rows in (1, 4):
            with self.assertRaisesRegex(NotImplementedError, r"window_size .* with causal=False"):
                call(SimpleNamespace(is_causal=False), sliding_window=rows)
        call(SimpleNamespace(is_causal=True), sliding_window=4)


class Masks(unittest.TestCase):
    def test_a_mask_that_is_more_than_causal_is_refused(self) -> None:
        model = llama()
        given = {"attention_mask": None, "past_key_values": None, "inputs_embeds": torch.zeros(1, 32, 32)}
        for more, name in (
            ({"or_mask_function": own_row}, "or_masks"),
            ({"and_mask_function": own_row}, "part `own_row"),
            ({"block_sequence_ids": torch.zeros(1, 32, dtype=torch.int64)}, "or_masks"),
        ):
            with self.assertRaisesRegex(NotImplementedError, name):
                create_causal_mask(config=model.config, **given, **more)
        self.assertIsNone(create_causal_mask(config=model.config, **given))

    def test_padding_is_refused(self) -> None:
        padded = torch.ones_like(TOKENS)
        model = llama()
        self.assertTrue(torch.equal(model(TOKENS, attention_mask=padded).logits, model(TOKENS).logits))
        padded[0, :3] = 0
        with self.assertRaisesRegex(NotImplementedError, "padding"):
            model(TOKENS, attention_mask=padded)

    def test_position_ids_that_begin_again_want_cu_seq_lens(self) -> None:
        model, twice = llama(), TWICE.expand(2, -1)
        ends = torch.arange(0, 65, 16, dtype=torch.int32)
        for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            with self.assertRaisesRegex(RuntimeError, "position_ids begin again .* pass cu_seq_lens_q"):
                run(TOKENS, position_ids=twice)
            found = run(TOKENS, position_ids=twice, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
            expected = llama(attn_implementation="sdpa")(TOKENS, position_ids=twice).logits
            self.assertLess((found - expected).abs().max(), 1e-5)
            with self.assertRaisesRegex(ValueError, "pass cu_seqlens"):
                run(TOKENS[:1], position_ids=TWICE)


class Chunks(unittest.TestCase):
    def llama4(self, attention: str, *, layers: tuple[int, ...] = (1, 0)) -> Llama4ForCausalLM:
        torch.manual_seed(1)
        small = SMALL | {"intermediate_size_mlp": 32, "head_dim": 8, "num_local_experts": 2, "pad_token_id": None}
        chunks = {"attention_chunk_size": 8, "no_rope_layers": list(layers)}
        return Llama4ForCausalLM(Llama4TextConfig(**(small | chunks | {"attn_implementation": attention})))

    def test_a_llama_4_learns_as_with_its_own_attention(self) -> None:
        models = [self.llama4(it) for it in ("cadre", "eager")]
        kinds = ("causal in chunks of 8", "causal")
        self.assertEqual(Shape.of(models[0]).kinds, kinds)
        self.assertEqual(tuple(layers_of(models[0])[0]), kinds)
        losses = [it(TOKENS, labels=TOKENS).loss for it in models]
        self.assertLess((losses[0] - losses[1]).abs() / losses[1], 1e-6)
        for it in losses:
            it.backward()
        for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            self.assertLess((one.grad - other.grad).abs().max(), 1e-5 * other.grad.abs().max() + 1e-12, name)

    def test_chunks_are_those_of_each_document(self) -> None:
        model, ends = self.llama4("cadre"), torch.tensor([0, 13, 32], dtype=torch.int32)
        # Without the layer whose queries are scaled by their row in the batch.
        model.config.attn_temperature_tuning = False
        model.model.layers[1].self_attn.attn_temperature_tuning = False
        positions = torch.cat([torch.arange(13), torch.arange(19)])[None]
        packed = model(TOKENS[:1], position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
        alone = model(TOKENS[:1, 13:], cu_seq_lens_q=torch.tensor([0, 19]), cu_seq_lens_k=torch.tensor([0, 19])).logits
        self.assertLess((packed[:, 13:] - alone).abs().max(), 1e-5)
        with self.assertRaisesRegex(RuntimeError, "position_ids begin again .* pass cu_seq_lens_q"):
            self.llama4("cadre", layers=(1, 1))(TOKENS, position_ids=TWICE.expand(2, -1))

    def test_a_module_that_does_not_say_its_chunks_is_refused(self) -> None:
        model = self.llama4("cadre")
        model.model.layers[0].self_attn.layer_idx = 1
        with self.assertRaisesRegex(NotImplementedError, "attention_mask: it has chunks, and the module's layer_idx"):
            model(TOKENS)


class Compiled(unittest.TestCase):
    def compiled(self, name: Callable[[LlamaForCausalLM], None]) -> int:
        """How many graphs four blocks have that are compiled each for itself, with the results of plain ones."""
        torch._dynamo.reset()
        counters.clear()
        models = [llama(num_hidden_layers=4) for _ in range(2)]
        for it in models:
            name(it)
        for it in models[0].model.layers:
            it.compile(backend="aot_eager", fullgraph=True)
        for it in models:
            it(TOKENS, labels=TOKENS).loss.backward()
        for one, other in zip(*(it.parameters() for it in models), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-7)
        return counters["stats"]["unique_graphs"]

    def test_all_blocks_have_one_compilation(self) -> None:
        self.assertEqual(self.compiled(name_layers), 1)

        def by_numbers(model: LlamaForCausalLM) -> None:
            for at, it in enumerate(model.model.layers):
                it.self_attn.cadre_layer = at

        # What a tensor is there for.
        with mock.patch.object(cadre.transformers, "attend", by_number):
            self.assertEqual(self.compiled(by_numbers), 4)


def by_number(*given: Any, layer: int, **more: Any) -> Any:
    return attend(*given, layer=torch.tensor(layer), **more)


class Frozen(unittest.TestCase):
    def test_first_layers_before_which_nothing_is_trained_have_no_backward(self) -> None:
        def frozen(trained: tuple[str, ...], prepare=lambda _: None, device: str = "cpu") -> int:
            with torch.device(device):
                model = llama().train()
            for name, it in model.named_parameters():
                it.requires_grad_(any(part in name for part in trained))
            prepare(model)
            found = _frozen.with_frozen(model, Shape.of(model)).frozen
            self.assertTrue(all(it.training for it in model.modules()))
            return found

        self.assertEqual(frozen(("",)), 0)
        self.assertEqual(frozen(("embed_tokens",)), 0)
        self.assertEqual(frozen(("layers.0.self_attn.v_proj",)), 0)
        self.assertEqual(frozen(("layers.0.self_attn.o_proj",)), 1)
        self.assertEqual(frozen(("layers.1", "model.norm")), 1)
        self.assertEqual(frozen(("lm_head",)), 2)
        # Transformers gives the first layer's inputs a gradient then.
        self.assertEqual(frozen(("lm_head",), lambda it: it.gradient_checkpointing_enable()), 0)
        # Tokens go where the embedding is.
        with FakeTensorMode():
            self.assertEqual(frozen(("layers.1", "model.norm"), device="cuda"), 1)
        with self.assertRaisesRegex(NotImplementedError, "on the meta device and partly frozen"):
            frozen(("lm_head",), lambda it: it.to("meta"))


class Shapes(unittest.TestCase):
    def test_a_model_that_ddp_wraps_is_looked_into(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        model = llama()
        expected = Shape.of(model)
        model.model.embed_tokens.requires_grad_(False)
        for it in model.model.layers[0].parameters():
            it.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        self.assertEqual(_frozen.with_frozen(wrapped, Shape.of(wrapped)), dataclasses.replace(expected, frozen=1))
        name_layers(wrapped)
        self.assertEqual([int(it.self_attn.cadre_layer) for it in model.model.layers], [0, 1])
        with self.assertRaisesRegex(TypeError, "Linear has no configuration of transformers; give a cadre.Shape"):
            Shape.of(DistributedDataParallel(torch.nn.Linear(1, 1)))

    def test_of_a_model_that_sees_images_the_layers_that_read_text_are_taken(self) -> None:
        small = {it: SMALL[it] for it in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
        seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        seen |= {"image_size": 16, "patch_size": 8}
        wide = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
        windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
        gemma = windows | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}
        llama4 = {"intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 8}
        for config, model, text, vision, kinds in (
            (Gemma3Config, Gemma3ForConditionalGeneration, gemma, {}, [" scale 0.25 softcap 20", "window:4"]),
            (Llama4Config, Llama4ForConditionalGeneration, llama4 | {"no_rope_layers": [1, 0]}, wide, ["", ""]),
            (LlavaConfig, LlavaForConditionalGeneration, {"model_type": "llama"}, {}, ["", "causal"]),
        ):
            images = {"model_type": "clip_vision_model"} if config is LlavaConfig else {}
            whole = config(text_config=small | text, vision_config=seen | vision | images)
            whole._attn_implementation = {"text_config": "cadre", "vision_config": "sdpa"}
            made = model(whole)
            first = f"{kinds[1] or 'causal in chunks of 8'}{kinds[0]}"
            shape = Shape.of(made)
            self.assertEqual((shape.kinds, shape.heads), ((first, f"causal{kinds[0]}"), ((4, 2, 8),) * 2))
            self.assertEqual(tuple(it.split(" s")[0] for it in shape.kinds), tuple(layers_of(made)[0]))
            name_layers(made)
            found = [int(it.cadre_layer) for it in made.modules() if hasattr(it, "cadre_layer")]
            self.assertEqual(found, [0, 1])
            # One that sees no image is called as any other.
            made.eval()
            with torch.no_grad():
                logits = made(TOKENS).logits
            made.set_attn_implementation("eager")
            with torch.no_grad():
                self.assertLess((made(TOKENS).logits - logits).abs().max(), 1e-5)
            made.set_attn_implementation("cadre")
            with self.assertRaisesRegex(NotImplementedError, 'vision_config .* "vision_config": "sdpa"'):
                Shape.of(made)

    def test_attention_modules_know_their_layer_unless_one_is_used_twice(self) -> None:
        model = llama()
        name_layers(model)
        self.assertEqual([int(it.self_attn.cadre_layer) for it in model.model.layers], [0, 1])
        twice = llama()
        twice.model.layers[1].self_attn.layer_idx = 0
        name_layers(twice)
        self.assertFalse(hasattr(twice.model.layers[0].self_attn, "cadre_layer"))

    def test_windows_are_read_without_kinds_of_layers(self) -> None:
        for config, model in ((MistralConfig, MistralForCausalLM), (Phi3Config, Phi3ForCausalLM)):
            windowed = model(config(**SMALL, sliding_window=8))
            self.assertEqual(Shape.of(windowed), Shape(4, 2, 8, ("window:8",) * 2))
            # The layers of the model call with it.
            torch.manual_seed(1)
            found = windowed(TOKENS).logits
            windowed.set_attn_implementation("sdpa")
            self.assertLess((windowed(TOKENS).logits - found).abs().max(), 1e-5)
            self.assertEqual(Shape.of(model(config(**SMALL, sliding_window=None))).kinds, ("causal",) * 2)
        bare = {"num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 32, "sliding_window": 8}
        unused = SimpleNamespace(config=SimpleNamespace(**bare, use_sliding_window=False))
        self.assertEqual(Shape.of(unused).kinds, ("causal",))

    def test_a_scale_that_no_config_names_is_that_of_the_attention_modules(self) -> None:
        small = SMALL | {"head_dim": 8, "intermediate_size": [32, 32], "sliding_window": 8}
        own = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        small["layer_types"] = ["sliding_attention", "full_attention"]
        config = Gemma3nTextConfig(**small, **own, num_kv_shared_layers=0)
        model = Gemma3nForCausalLM(config).eval()
        self.assertEqual(Shape.of(model).kinds, ("window:8 scale 1", "causal scale 1"))
        with torch.no_grad():
            found = model(TOKENS).logits
            model.set_attn_implementation("eager")
            self.assertLess((model(TOKENS).logits - found).abs().max(), 1e-4)
        yarn = llama()
        yarn.model.layers[1].self_attn.scaling = 0.25
        self.assertEqual(Shape.of(yarn).kinds, ("causal", "causal scale 0.25"))

    def test_kinds_are_written_in_one_way(self) -> None:
        kinds = ("chunk:512", Kind(chunk=512), Kind(softcap=0.0, scale=8**-0.5), "causal scale 0.5")
        expected = ("causal in chunks of 512", "causal in chunks of 512", "causal", "causal scale 0.5")
        self.assertEqual(Shape(4, 2, 8, kinds).kinds, expected)

    def test_layers_have_heads_of_their_own(self) -> None:
        kinds = ("causal", Kind("window:8", heads=(8, 4)), Kind(scale=16**-0.5, head_dim=16))
        shape = Shape(4, 2, 8, kinds)
        self.assertEqual(shape.kinds, ("causal", "window:8", "causal"))
        self.assertEqual(shape.heads, ((4, 2, 8), (8, 4, 8), (4, 2, 16)))
        self.assertEqual(dataclasses.replace(shape, frozen=1).heads, shape.heads)
        with self.assertRaisesRegex(ValueError, "3 layers have kinds and 1 heads"):
            dataclasses.replace(shape, heads=((4, 2, 8),))
        # As models whose layers differ say it: in the modules.
        model = llama()
        attention = model.model.layers[1].self_attn
        attention.head_dim, attention.num_key_value_groups = 16, 4
        self.assertEqual(Shape.of(model).heads, ((4, 2, 8), (4, 1, 16)))

    def test_a_window_without_rows_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "sliding_window is 0"):
            call(sliding_window=0)
        config = LlamaConfig(**SMALL)
        config.layer_types = ["full_attention", "sliding_attention"]
        with self.assertRaisesRegex(NotImplementedError, "sliding_window is None"):
            Shape.of(SimpleNamespace(config=config))

    def test_models_that_are_not_causal_are_refused(self) -> None:
        small = {name: it for name, it in SMALL.items() if name != "num_key_value_heads"}
        encoder = BertModel(BertConfig(**small))
        both = T5Model(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4))
        for model in (encoder, both, llama(is_causal=False)):
            with self.assertRaisesRegex(NotImplementedError, "not causal.*give a cadre.Shape"):
                Shape.of(model)
        self.assertEqual(Shape.of(llama()).kinds, ("causal",) * 2)


if __name__ == "__main__":
    unittest.main()
