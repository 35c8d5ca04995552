"""Faces of attention beside FlashAttention's for packed rows, and `install`, which puts them where others were."""

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
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import hub_kernels

REPOSITORY = Path(__file__).resolve().parents[1] / "cadre/kernel"

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
            with self.assertRaisesRegex(ValueError, "give a batch of 1 or more, with 1 row or more each"):
                cadre.flash_attn_func(*(it[none] for it in rows))

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

    def test_transformers_loads_it_as_a_kernel_by_its_name(self) -> None:
        if hub_kernels.is_kernels_available():
            found = mock.patch.dict(os.environ, {"LOCAL_KERNELS": f"cadre/attention={REPOSITORY}"})
        else:
            # Without the package `kernels`, which finds the file in the repository and imports it.
            found = mock.patch.multiple(hub_kernels, is_kernels_available=lambda: True, get_kernel=loaded)
        with found:
            models = [llama(it) for it in ("cadre/attention", "sdpa")]
        # Two documents in a row, as their positions say, and rows that are documents.
        packed = {"input_ids": torch.arange(30)[None] * 7 % 64, "position_ids": torch.arange(30)[None] % 18}
        for batch in (packed, {"input_ids": packed["input_ids"].view(2, 15)}):
            results = [it(**batch, use_cache=False).logits for it in models]
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
            for it in results:
                it.square().sum().backward()
        for one, other in zip(*(it.parameters() for it in models), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


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


if __name__ == "__main__":
    unittest.main()
