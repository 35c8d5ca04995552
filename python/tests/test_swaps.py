"""Faces of attention beside FlashAttention's for packed rows, and `install`, which puts them where others were."""

import contextlib
import importlib.util
import inspect
import os
import sys
import tempfile
import textwrap
import types
import unittest
from pathlib import Path
from unittest import mock

import cadre
import torch
from test_pool import gemma, gpt_oss, qwen
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations import hub_kernels

# As the page tells it.
REPOSITORY = Path(cadre.__path__[0]) / "kernel"

BATCH, ROWS = 3, 20
# Arguments of FlashAttention's function for batches.
FLASH = [
    "q",
    "k",
    "v",
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
ENDS = torch.arange(0, BATCH * ROWS + 1, ROWS, dtype=torch.int32)


def drawn() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, ROWS, heads, 16, generator=draw).requires_grad_() for heads in (4, 2, 2)]


def of_torch(q: Tensor, k: Tensor, v: Tensor, **more: object) -> Tensor:
    return scaled_dot_product_attention(*(it.transpose(1, 2) for it in (q, k, v)), enable_gqa=True, **more).transpose(
        1, 2
    )


class Swaps(unittest.TestCase):
    def alike(self, found: Tensor, expected: Tensor, rows: list[Tensor]) -> None:
        for one, other in zip(
            (found, *torch.autograd.grad(found.square().sum(), rows)),
            (expected, *torch.autograd.grad(expected.square().sum(), rows)),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    def test_rows_of_a_batch_are_documents(self) -> None:
        rows = drawn()
        for causal in (False, True):
            self.alike(cadre.flash_attn_func(*rows, causal=causal), of_torch(*rows, is_causal=causal), rows)
        o, lse, none = cadre.flash_attn_func(*rows, causal=True, return_attn_probs=True)
        self.assertEqual((o.shape, lse.shape, none), (rows[0].shape, (BATCH, 4, ROWS), None))
        # The same by position, as FlashAttention orders them.
        alone = cadre.flash_attn_func(*(it[1:2] for it in rows), 0.0, None, True, (-1, -1), 0.0, None, False, True)
        self.assertTrue(torch.equal(lse[1:2], alone[1]))
        self.assertEqual(list(inspect.signature(cadre.flash_attn_func).parameters)[:11], FLASH)
        with self.assertRaisesRegex(ValueError, "give \\[batch, rows, heads, dim\\], of equal rows"):
            cadre.flash_attn_func(rows[0], rows[1][:, :5], rows[2][:, :5])
        for none in (slice(0), (slice(None), slice(0))):
            # A rank may have no documents, and calls its model all the same.
            given = [it[none].detach().requires_grad_() for it in rows]
            o, lse, _ = cadre.flash_attn_func(*given, causal=True, return_attn_probs=True)
            self.assertEqual((o.shape, lse.shape), (given[0].shape, (len(o), 4, o.shape[1])))
            self.assertEqual([it.shape for it in torch.autograd.grad(o.sum(), given)], [it.shape for it in given])

    def test_pytorchs_windows_say_what_is_causal(self) -> None:
        rows = drawn()
        packed = [it.flatten(0, 1) for it in rows]

        def call(**more: object) -> Tensor:
            return cadre.varlen_attn(*packed, ENDS, ENDS, ROWS, ROWS, enable_gqa=True, **more)

        self.alike(call().unflatten(0, (BATCH, ROWS)), of_torch(*rows), rows)
        causal = of_torch(*rows, is_causal=True, scale=0.3)
        self.alike(call(window_size=(-1, 0), scale=0.3).unflatten(0, (BATCH, ROWS)), causal, rows)
        before = torch.arange(ROWS)[:, None] - torch.arange(ROWS)[None]
        near = of_torch(*rows, attn_mask=(before >= 0) & (before <= 5))
        o, lse = call(window_size=(5, 0), return_aux=varlen.AuxRequest(lse=True))
        self.alike(o.unflatten(0, (BATCH, ROWS)), near, rows)
        self.assertEqual(lse.shape, (4, BATCH * ROWS))
        # As torch 2.10 has it: by position, without a window, and heads are not asked for.
        old = cadre.varlen_attn(*packed, ENDS, ENDS, ROWS, ROWS, True, varlen.AuxRequest(lse=True))
        self.alike(old[0].unflatten(0, (BATCH, ROWS)), of_torch(*rows, is_causal=True), rows)
        full = cadre.varlen_attn(*packed, ENDS, ENDS, ROWS, ROWS, is_causal=False)
        self.alike(full.unflatten(0, (BATCH, ROWS)), of_torch(*rows), rows)
        for more, error, words in (
            ({"window_size": (-1, 3)}, NotImplementedError, "window_size"),
            ({"block_table": ENDS}, NotImplementedError, "block_table is a tensor"),
            ({"enable_gqa": False}, ValueError, "query has 4 heads and key 2; pass enable_gqa=True"),
        ):
            with self.assertRaisesRegex(error, words):
                call(**more) if "enable_gqa" not in more else cadre.varlen_attn(*packed, ENDS, ENDS, ROWS, ROWS)

    def test_originals_are_replaced_wherever_a_module_holds_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "flash_attn"
            package.mkdir()
            own = "def flash_attn_func(*_):\n    raise AssertionError\nflash_attn_varlen_func = lambda *_: None\n"
            (package / "flash_attn_interface.py").write_text(own)
            (package / "__init__.py").write_text("from .flash_attn_interface import *\n")
            users = """
                from flash_attn import flash_attn_func, flash_attn_varlen_func as packed
                from torch.nn.attention.varlen import varlen_attn
            """
            (Path(folder) / "a_model.py").write_text(textwrap.dedent(users))
            sys.path.insert(0, folder)
            self.addCleanup(sys.path.remove, folder)
            self.addCleanup(setattr, varlen, "varlen_attn", varlen.varlen_attn)
            model = importlib.import_module("a_model")
            for name in ("a_model", "flash_attn", "flash_attn.flash_attn_interface"):
                self.addCleanup(sys.modules.pop, name)
            replaced = cadre.install()
        self.assertIn("a_model.packed", replaced)
        self.assertIn("flash_attn.flash_attn_interface.flash_attn_func", replaced)
        self.assertIn("transformers: cadre", replaced)
        ours = (cadre.flash_attn_func, cadre.flash_attn_varlen_func, cadre.varlen_attn)
        self.assertEqual((model.flash_attn_func, model.packed, model.varlen_attn), ours)
        self.assertIs(varlen.varlen_attn, cadre.varlen_attn)
        # A second one has nothing to do.
        self.assertEqual(cadre.install(), ["transformers: cadre"])

    def test_a_window_is_that_of_flashattention(self) -> None:
        rows = drawn()
        before = torch.arange(ROWS)[:, None] - torch.arange(ROWS)[None]
        near = {"attn_mask": (before >= 0) & (before <= 5)}
        # A causal call looks at no later row, whatever its window says to the right.
        for causal, window, expected in (
            (True, (5, 5), near),
            (True, (5, 0), near),
            (True, (5, -1), near),
            (False, (5, 0), near),
            (True, (-1, 3), {"is_causal": True}),
            (False, (-1, 0), {"is_causal": True}),
            (False, (-1, -1), {}),
        ):
            with self.subTest(causal=causal, window=window):
                found = cadre.flash_attn_func(*rows, causal=causal, window_size=window)
                self.alike(found, of_torch(*rows, **expected), rows)

    def test_sinks_have_the_names_of_other_flashattentions(self) -> None:
        rows, sinks = drawn(), torch.tensor([0.5, -1.0, 2.0, 0.0])
        expected = cadre.flash_attn_func(*rows, causal=True, sinks=sinks)
        for name in ("s_aux", "learnable_sink"):
            self.assertTrue(torch.equal(cadre.flash_attn_func(*rows, causal=True, **{name: sinks}), expected), name)
        with self.assertRaisesRegex(TypeError, "sinks and s_aux are given; they are names of one argument: give one"):
            cadre.flash_attn_func(*rows, causal=True, sinks=sinks, s_aux=sinks)

    def by_name(self) -> contextlib.AbstractContextManager:
        """What lets transformers find the kernel by its name."""
        if hub_kernels.is_kernels_available():
            return mock.patch.dict(os.environ, {"LOCAL_KERNELS": f"cadre/attention={REPOSITORY}"})
        # Without the package `kernels`, which finds the file in the repository and imports it.
        return mock.patch.multiple(hub_kernels, is_kernels_available=lambda: True, get_kernel=loaded)

    def test_transformers_loads_it_as_a_kernel_by_its_name(self) -> None:
        # Two documents in a row, as their positions say, and rows that are documents.
        ids = torch.arange(90)[None] * 7 % 64
        packed = {"input_ids": ids, "position_ids": torch.arange(90)[None] % 54}
        alone = {"input_ids": ids.view(2, 45)}
        short = {"input_ids": ids.view(9, 10)}
        for make, theirs, batches in (
            (llama, "sdpa", (packed, alone, short)),
            (mistral, "sdpa", (packed, alone, short)),
            (qwen, "sdpa", (packed, alone, short)),
            (gemma, "eager", (packed, alone, short)),
            # Its own attention lets packed documents see each other.
            (gpt_oss, "eager", (alone, short)),
        ):
            with self.by_name():
                models = [make(it) for it in ("cadre/attention", theirs)]
            for batch in batches:
                results = [it(**batch, labels=batch["input_ids"], use_cache=False).loss for it in models]
                for it in results:
                    it.backward()
                ours, plain = (it.item() for it in results)
                self.assertLess(abs(ours - plain) / plain, 1e-6, make.__name__)
            for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                off = (one.grad - other.grad).abs().max() / other.grad.abs().max()
                self.assertLess(off, 1e-5, f"{make.__name__}: {name}")


def loaded(name: str, **_: object) -> types.ModuleType:
    """As `kernels` does it."""
    if name != "cadre/attention":
        raise AssertionError(name)
    spec = importlib.util.spec_from_file_location("attention", REPOSITORY / "build/torch-cpu/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation=attention))


def mistral(attention: str) -> MistralForCausalLM:
    """All layers have a window."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(**sizes, **heads, attn_implementation=attention))


if __name__ == "__main__":
    unittest.main()
