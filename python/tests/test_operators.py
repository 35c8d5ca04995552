"""The operators without a job: computed in this process, by the kernels that servers run."""

import ast
import inspect
import sys
import threading
import time
import unittest
from pathlib import Path
from types import ModuleType
from unittest import mock

import cadre
import cadre.transformers
import torch
from cadre import _frozen, _job, _layout, _native, _plain
from test_transformers import llama
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
DOCUMENTS = [30, 1, 130]
CU_SEQLENS = torch.tensor([0, 30, 31, 161], dtype=torch.int32)


def rows(heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(161, it, dim) for it in (heads, kv_heads, kv_heads)]
    return [torch.randn(it, generator=generator).to(dtype).requires_grad_() for it in shapes]


def call(q, k, v, causal: bool = True, **more):
    return cadre.flash_attn_varlen_func(q, k, v, CU_SEQLENS, CU_SEQLENS, 130, 130, causal=causal, **more)


def reference(
    q, k, v, causal: bool, left: int, scale: float, softcap: float = 0.0, chunk: int = 1000, sinks=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE as `call` gives them, by plain operators of torch."""
    results = []
    for document in zip(*(it.split(DOCUMENTS) for it in (q, k, v)), strict=True):
        q, k, v = (it.transpose(0, 1) for it in document)
        k, v = (it.repeat_interleave(q.shape[0] // k.shape[0], 0) for it in (k, v))
        row = torch.arange(q.shape[1])
        after = row[None] - row[:, None]
        mask = (after <= 0) & (after >= -left) if causal else torch.ones_like(after, dtype=torch.bool)
        mask &= row[None] // chunk == row[:, None] // chunk
        scores = q @ k.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, q.shape[1], 1)), 2)
        o = scores.softmax(-1)[:, :, : q.shape[1]] @ v
        results.append((o.transpose(0, 1), scores.logsumexp(-1)))
    return torch.cat([it[0] for it in results]), torch.cat([it[1] for it in results], 1)


class Types(unittest.TestCase):
    def test_the_native_half_has_the_names_and_arguments_of_its_types(self) -> None:
        told = ast.parse((Path(cadre.__file__).parent / "_native.pyi").read_text())
        self.compare(told, _native)
        self.assertEqual(type(_native.__version__), str)

    def compare(self, told: ast.Module | ast.ClassDef, found: ModuleType | type) -> None:
        parts = {it.name: it for it in told.body if isinstance(it, (ast.ClassDef, ast.FunctionDef))}
        values = {it.target.id for it in told.body if isinstance(it, ast.AnnAssign)} - {"__version__"}
        self.assertEqual(parts.keys() | values, {it for it in vars(found) if not it.startswith("__")})
        for name, it in parts.items():
            if isinstance(it, ast.ClassDef):
                self.compare(it, getattr(found, name))
                continue
            is_static = bool(it.decorator_list)
            it.decorator_list, scope = [], {}
            exec(f"from __future__ import annotations\n{ast.unparse(it)}", scope)
            both = [list(inspect.signature(of).parameters.values()) for of in (scope[name], getattr(found, name))]
            # How a method takes itself is no matter.
            one, other = (of[isinstance(found, type) and not is_static :] for of in both)
            self.assertEqual(*([(of.name, of.kind, of.default) for of in of_one] for of_one in (one, other)), name)


class Operators(unittest.TestCase):
    def test_gradients_are_those_of_torch_in_f64(self) -> None:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
        for causal, left, scale, heads, more in (
            (True, 1000, None, (4, 2, 16), {}),
            (True, 20, None, (4, 1, 64), {}),
            (False, 1000, None, (3, 3, 8), {}),
            (True, 1000, 0.4, (4, 2, 16), {}),
            (True, 1000, None, (4, 2, 16), {"sinks": sinks}),
            (True, 1000, 2.0, (4, 2, 16), {"softcap": 1.5}),
            (True, 20, 0.4, (4, 2, 16), {"softcap": 3.0, "chunk": 33, "sinks": sinks}),
        ):
            with self.subTest(causal=causal, left=left, scale=scale, heads=heads, **more):
                ours = rows(*heads)
                window = (left, 0) if left < 1000 else (-1, -1)
                learnt = [more["sinks"].clone().requires_grad_()] if "sinks" in more else []
                given = more | ({"sinks": learnt[0]} if learnt else {})
                arguments = {"window_size": window, "softmax_scale": scale, "return_attn_probs": True}
                o, lse, none = call(*ours, causal, **arguments, **given)
                self.assertIsNone(none)
                theirs = [it.detach().double().requires_grad_() for it in (*ours, *learnt)]
                given = more | ({"sinks": theirs[3]} if learnt else {})
                wide = reference(*theirs[:3], causal, left, scale or heads[2] ** -0.5, **given)
                weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
                found = torch.autograd.grad((o * weights).sum() + lse.sum(), (*ours, *learnt))
                wanted = torch.autograd.grad((wide[0] * weights).sum() + wide[1].sum(), theirs)
                for a, b in zip((o, lse, *found), (*wide, *wanted), strict=True):
                    self.assertLess((a.double() - b).abs().max() / b.abs().max(), 1e-5)

    def test_a_document_of_one_row_is_as_exact_as_what_cancels_in_it(self) -> None:
        draw = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(1, 2, 8, generator=draw).requires_grad_() for _ in range(3))
        dout, ends = torch.randn(1, 2, 8, generator=draw), torch.tensor([0, 1])
        o, lse, _ = cadre.flash_attn_varlen_func(q, k, v, ends, ends, 1, 1, causal=True, return_attn_probs=True)
        dq, dk = torch.autograd.grad((o * dout).sum() + 0.01 * lse.sum(), (q, k))
        # All that is left where the gradient of O cancels.
        for found, exact in ((dq, 0.01 * k * 8**-0.5), (dk, 0.01 * q * 8**-0.5)):
            terms = (dout * v).abs().sum(-1, keepdim=True) * exact / 0.01
            self.assertLess((found - exact).abs().max() / terms.abs().max(), 1e-6)

    def test_the_operators_keep_torchs_rules(self) -> None:
        q, k, v = rows()
        apart = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        half = rows(dtype=torch.bfloat16)
        for arguments in (
            (q, k, v, CU_SEQLENS, CU_SEQLENS, "causal", None),
            (apart, k, v, CU_SEQLENS, None, "window:8 in chunks of 20 scale 0.3 softcap 2", torch.tensor(0)),
            (*half, CU_SEQLENS, None, "full", None),
        ):
            torch.library.opcheck(torch.ops.cadre.attention.default, arguments)
        # Plain attention, under `cadre check`.
        check = mock.Mock(plain=True, spanning=lambda _: None, announced=lambda lengths, number: (lengths, number))
        check.attention = lambda kind, lengths, qkv: _plain.forward(kind, lengths, *qkv)
        check.gradients = _plain.backward
        with mock.patch.object(_job, "check", lambda: check):
            torch.library.opcheck(torch.ops.cadre.attention.default, (apart, k, v, CU_SEQLENS, None, "causal", None))

    def test_a_compiled_model_has_no_break_and_the_same_bits(self) -> None:
        def model(q, k, v):
            return call(q * 2, k, v).square().sum()

        inputs = rows()
        expected = torch.autograd.grad(model(*inputs), inputs)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            self.assertTrue(torch.equal(a, b))
        # Of any number of rows, compiled once.
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        dynamic = torch.compile(
            lambda q, k, v, ends: cadre.flash_attn_varlen_func(q, k, v, ends, ends, 9, 9, causal=True),
            backend=counter,
            fullgraph=True,
            dynamic=True,
        )
        for count in (9, 100, 161):
            some, ends = [it.detach()[:count] for it in inputs], torch.tensor([0, 5, count])
            expected = cadre.flash_attn_varlen_func(*some, ends, ends, 9, 9, causal=True)
            self.assertTrue(torch.equal(dynamic(*some, ends), expected))
            compiled = counter.frame_count if count == 9 else compiled
        self.assertEqual(counter.frame_count, compiled)

    def test_scales_windows_and_chunks_of_any_number_are_compiled(self) -> None:
        class Layer(torch.nn.Module):
            def __init__(self, **how) -> None:
                super().__init__()
                self.how = how

            def forward(self, q, k, v):
                return call(2 * q, k, v, **self.how)

        three = [it.detach() for it in rows()]
        for name, values in (
            ("softmax_scale", (0.3, 0.7, 0.11)),
            ("softcap", (20.0, 30.0, 7.0)),
            ("window_size", ((7, 0), (9, 0), (31, 0))),
            ("chunk", (11, 20, 33)),
        ):
            torch._dynamo.reset()
            for value in values:
                layer = Layer(**{name: value})
                found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*three)
                self.assertTrue(torch.equal(found, layer(*three)), f"{name} {value}")

    def test_an_operator_says_that_no_cuda_graph_can_hold_it(self) -> None:
        for it in (torch.ops.cadre.attention, torch.ops.cadre.attention_backward):
            self.assertIn(torch.Tag.cudagraph_unsafe, it.default.tags)

    def test_other_threads_of_python_run_while_attention_is_computed(self) -> None:
        count, over = [0], threading.Event()

        def counts() -> None:
            while not over.is_set():
                count[0] += 1
                # It gives the lock back.
                time.sleep(0)

        q = torch.randn(2000, 4, 64).requires_grad_()
        ends = torch.tensor([0, 2000])
        thread, before = threading.Thread(target=counts), sys.getswitchinterval()
        # Nobody takes the lock from who holds it.
        sys.setswitchinterval(1000.0)
        thread.start()
        try:
            seen = count[0]
            o = cadre.flash_attn_varlen_func(q, q, q, ends, ends, 2000, 2000, causal=True)
            self.assertGreater(count[0], seen)
            loss, seen = o.square().sum(), count[0]
            loss.backward()
            self.assertGreater(count[0], seen)
        finally:
            over.set()
            thread.join()
            sys.setswitchinterval(before)

    def test_rows_at_a_distance_are_read_where_they_lie(self) -> None:
        together = torch.randn(161, 8, 16, generator=torch.Generator().manual_seed(3))
        q, k, v = together[:, :4], together[:, 4:6], together[:, 6:]
        expected = call(*(it.contiguous() for it in (q, k, v)))
        self.assertTrue(torch.equal(call(q, k, v), expected))

    def test_rows_in_any_place_have_the_bits_of_those_side_by_side(self) -> None:
        def seen(it: torch.Tensor, how: int) -> torch.Tensor:
            """The same numbers, otherwise in memory."""
            if how == 0:
                return it.transpose(0, 1).contiguous().transpose(0, 1)
            if how == 1:
                return it.repeat_interleave(2, 0)[::2]
            if how == 2:
                return it.repeat_interleave(2, 2)[..., ::2]
            if how == 3:
                return it[:1].expand_as(it)
            # An imaginary part of a conjugate is marked as negative, and its memory has the other sign.
            return torch.complex(it, -it).conj().imag

        generator = torch.Generator().manual_seed(3)
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(24):
                three = [it.detach() for it in rows(dtype=dtype)]
                dout = torch.randn(three[0].shape, generator=generator).to(dtype)
                hows = torch.randint(6, (4,), generator=generator).tolist()
                if dtype == torch.bfloat16:
                    # There are no complex numbers of it.
                    hows = [it % 4 for it in hows]
                odd = [seen(it, how) if how < 5 else it for it, how in zip((*three, dout), hows, strict=True)]
                plain = [it.contiguous().clone() for it in odd]
                self.assertTrue(all(torch.equal(*both) for both in zip(odd, plain, strict=True)))
                found = []
                for *inputs, gradient in (odd, plain):
                    inputs = [it.requires_grad_() for it in inputs]
                    o, lse, _ = call(*inputs, return_attn_probs=True)
                    of_lse = torch._neg_view(-lse.detach()) if inputs[0] is odd[0] else lse.detach()
                    found.append([o, *torch.autograd.grad((o, lse), inputs, (gradient, of_lse))])
                for one, other in zip(*found, strict=True):
                    self.assertTrue(torch.equal(one, other), hows)

    def test_a_second_derivative_and_a_tangent_are_refused(self) -> None:
        q, k, v = rows()
        found, expected = [], []
        for results, create_graph in ((found, True), (expected, False)):
            results += torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v), create_graph=create_graph)
        for a, b in zip(found, expected, strict=True):
            self.assertTrue(torch.equal(a, b))
        for it in found:
            with self.assertRaisesRegex(NotImplementedError, "cadre::attention_backward has no gradient"):
                torch.autograd.grad(it.square().sum(), q, retain_graph=True)
        with forward_ad.dual_level():
            k = forward_ad.make_dual(k.detach(), torch.ones_like(k))
            with self.assertRaisesRegex(NotImplementedError, "k has a tangent"):
                call(q.detach(), k, v.detach())
        with self.assertRaisesRegex(NotImplementedError, "q has a tangent"):
            torch.func.jvp(lambda it: call(it, it, it), (q.detach()[:, :2],), (q.detach()[:, :2],))

    def test_ends_that_change_before_the_backward_change_no_gradient(self) -> None:
        three, ends = rows(), CU_SEQLENS.clone()
        expected = torch.autograd.grad(call(*three).square().sum(), three)
        for create_graph in (False, True):
            ends.copy_(CU_SEQLENS)
            o = cadre.flash_attn_varlen_func(*three, ends, ends, 130, 130, causal=True)
            # As a loader does that has one buffer.
            ends.copy_(torch.tensor([0, 1, 2, 161]))
            found = torch.autograd.grad(o.square().sum(), three, create_graph=create_graph)
            for one, other in zip(found, expected, strict=True):
                self.assertTrue(torch.equal(one, other), f"create_graph={create_graph}")

    def test_a_transform_of_functions_is_refused_by_its_name(self) -> None:
        q = rows(2)[0]

        def loss(q: torch.Tensor) -> torch.Tensor:
            return call(q, q, q).square().sum()

        inner = torch.func.grad(loss)
        for transform in (inner, torch.func.jacrev(loss), torch.func.hessian(loss), torch.func.grad(inner)):
            with self.assertRaisesRegex(NotImplementedError, "torch.func.* reverse mode .*; use torch.autograd.grad"):
                transform(q)
        with self.assertRaisesRegex(NotImplementedError, "torch.func.* reverse mode"):
            torch.vmap(inner)(q[None])
        one = q.detach()
        for transform, given in ((inner, one), (torch.func.jacrev(loss), one), (torch.vmap(inner), one[None])):
            # Torch 2.9 refuses it itself, by other words.
            ours = NotImplementedError, "torch.func.* reverse mode"
            with self.assertRaisesRegex(*((RuntimeError, "autograd.Function") if IS_OLD else ours)):
                torch.compile(transform, backend="aot_eager")(given)
        with self.assertRaisesRegex(NotImplementedError, "is_grads_batched .* torch.autograd.grad once for each"):
            torch.autograd.grad(loss(q), q, torch.ones(3), is_grads_batched=True)
        # Which makes one call after the other.
        both = torch.vmap(lambda q: call(q, q, q))(torch.stack((q, 2 * q)).detach())
        for one, other in zip(both, (q, 2 * q), strict=True):
            self.assertTrue(torch.equal(one, call(other, other, other)))
        step = (mock.Mock(), mock.Mock())
        with (
            mock.patch.object(_job, "pooled", lambda: step),
            self.assertRaisesRegex(NotImplementedError, "torch.vmap .* one phase of a step"),
        ):
            torch.vmap(lambda q: call(q, q, q))(q[None].detach())

    def test_autocast_casts_all_three(self) -> None:
        q, k, v = rows()
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(call(q, k.bfloat16(), v).dtype, torch.bfloat16)

    @unittest.skipIf(IS_OLD, "torch 2.9 asks a driver for it")
    def test_tensors_of_a_gpu_have_results_there(self) -> None:
        for name in ("attention", "attention_backward"):
            self.assertTrue(torch._C._dispatch_has_kernel_for_dispatch_key(f"cadre::{name}", "CUDA"))
        # Of which torch knows all but the numbers.
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k, v = rows_of = [torch.empty(161, it, 16, device="cuda") for it in (4, 2, 2)]
            o, lse, _ = call(q, k, v, sinks=torch.empty(4, device="cuda"), return_attn_probs=True)
            arguments = (o, lse, *rows_of, o, lse, torch.tensor(0), None, "causal")
            for it in (o, lse, *torch.ops.cadre.attention_backward(*arguments)):
                self.assertEqual(it.device.type, "cuda")
            with self.assertRaisesRegex(ValueError, "k is on cpu and q on cuda:0; give all three on one device"):
                call(q, torch.empty(161, 2, 16), v)
            torch.set_autocast_enabled("cuda", True)
            self.addCleanup(torch.set_autocast_enabled, "cuda", False)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            self.assertEqual(call(q, k.bfloat16(), v).dtype, torch.bfloat16)
        with self.assertRaisesRegex(NotImplementedError, "q is on meta; rows lie on the CPU or on a GPU"):
            call(*(it.to("meta") for it in rows()))

    def test_the_default_device_changes_nothing(self) -> None:
        q, k, v = rows()
        batch = [it[:160].unflatten(0, (2, 80)) for it in (q, k, v)]
        document, model = torch.arange(5), llama()
        model.model.embed_tokens.requires_grad_(False)

        def results() -> list[torch.Tensor]:
            o, lse, _ = call(q, k, v, return_attn_probs=True)
            ticket = torch.ops.cadre.attention(q, k, v, CU_SEQLENS, None, "causal", None)[2]
            twice = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v), create_graph=True)
            compiled = torch.compile(lambda: call(q * 2, k, v), backend="aot_eager", fullgraph=True)()
            heads = (it.transpose(1, 2) for it in batch)
            batches = cadre.flash_attn_func(*batch), cadre.transformers.attention(None, *heads, None)[0]
            packed = vars(cadre.pack([document], rank=0, ranks=1)).values()
            self.assertEqual(_layout.lengths_of({"cu_seqlens": [0, 3, 8]}), [3, 5])
            _layout.name_layers(model)
            _frozen.with_frozen(model, cadre.Shape.of(model))
            found = (o, lse, ticket, *twice, compiled, *batches, *packed, model.model.layers[1].self_attn.cadre_layer)
            return [it for it in found if isinstance(it, torch.Tensor)]

        expected = results()
        self.addCleanup(torch.set_default_device, None)
        torch.set_default_device("meta")
        for one, other in zip(expected, results(), strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_the_native_half_refuses_memory_that_it_cannot_use(self) -> None:
        q, k, v = (it.detach() for it in rows())
        batch, lse = ("causal", 1, DOCUMENTS), torch.empty(161, 4)
        for o, lse_, words in (
            (torch.empty_like(q).double(), lse, "O is torch.float64"),
            (torch.empty(4, 161, 16).transpose(0, 1), lse, "O does not have the elements of a row side by side"),
            (torch.empty(160, 4, 16), lse, r"O is \[160, 4, 16\], not \[161, 4, 16\]"),
            (q, lse, "O shares memory with Q"),
            (torch.empty_like(q), torch.empty(161, 8)[:, ::2], "LSE does not have"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                _native.local_forward(batch, (q, k, v), (o, lse_))
        with self.assertRaisesRegex(RuntimeError, "init"):
            cadre.begin_step([1])
        with self.assertRaisesRegex(RuntimeError, "CADRE_CONTROL is not set"):
            cadre.Session.join(kinds=["causal"], heads=[(1, 1, 8)], steps=1, seed=0, threads=1)


if __name__ == "__main__":
    unittest.main()
