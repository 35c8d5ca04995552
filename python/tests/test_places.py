"""Where attention is computed in a process that no job has started, in which threads, and of which type rows are."""

import contextlib
import contextvars
import ctypes
import io
import os
import re
import signal
import sys
import threading
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cadre
import torch
from alone import Alone
from cadre import _frozen, _here, _job, _layout, _local, _place


class Nested(torch.autograd.Function):
    """A backward that calls others, so many in one another; the innermost says where it is."""

    @staticmethod
    def forward(ctx, rows, depth, seen):
        ctx.depth, ctx.seen = depth, seen
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            nested(ctx.depth - 1, ctx.seen)
        else:
            ctx.seen.append((threading.get_ident(), _local.under_local(), _local.says_whole()))
        return gradient, None, None


def nested(depth: int, seen: list) -> None:
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), depth, seen).sum().backward()


class Halves(Alone):
    def test_without_a_pool_the_first_half_computes(self) -> None:
        def rows() -> list[torch.Tensor]:
            draw = torch.Generator().manual_seed(1)
            return [torch.randn(8, 2, 8, generator=draw).requires_grad_() for _ in range(3)]

        self.join()
        cadre.begin_step([[3, 5], [8]], turns="F0+1 B1+0")
        for at, ends in enumerate(([0, 3, 8], [0, 8])):
            both = rows(), rows()
            ends = torch.tensor(ends)
            o, lse, _ = cadre.flash_attn_varlen_func(*both[0], ends, ends, 0, 0, causal=True, return_attn_probs=True)
            flight = cadre.submit(*both[1], micro_batch=at)
            found = cadre.wait(flight)
            for results, given in (((o, lse.T), both[0]), (found, both[1])):
                sum(it.square().sum() for it in results).backward()
                given += [it.grad for it in given] + list(results)
            for one, other in zip(*both, strict=True):
                self.assertTrue(torch.equal(one, other))
            with self.assertRaisesRegex(ValueError, "it was waited for; submit again"):
                cadre.wait(flight)
        with cadre.local(), self.assertRaisesRegex(ValueError, "under cadre.local.* pass cu_seqlens"):
            cadre.submit(*rows(), micro_batch=0)
        with self.assertRaisesRegex(TypeError, "tuple is not what cadre.submit returned"):
            cadre.wait(found)
        with self.assertRaisesRegex(Exception, "cadre.submit is not for compiled code"):
            torch.compile(lambda *it: cadre.wait(cadre.submit(*it)), backend="eager", fullgraph=True)(*rows())

    def test_a_thread_of_the_scripts_own_is_not_under_local_and_its_refusal_says_so(self) -> None:
        self.join()
        cadre.begin_step([8])
        q = torch.ones(8, 2, 8)

        def evaluated(*ends: torch.Tensor) -> torch.Tensor:
            return cadre.flash_attn_varlen_func(q, q, q, *(ends or [None, None]), 8, 8, causal=True)

        def in_thread(call: Callable, *ends: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as threads:
                return threads.submit(call, *ends).result()

        evaluated()
        with self.assertRaisesRegex(RuntimeError, "evaluate under cadre.local\\(\\)$"):
            in_thread(evaluated)
        words = "under cadre.local.*; cadre.local.. counts in the thread or coroutine that calls, and another is under"
        with cadre.local():
            with self.assertRaisesRegex(RuntimeError, words):
                in_thread(evaluated)
            # What the page says to do.
            in_thread(cadre.local()(evaluated), *[torch.tensor([0, 8])] * 2)
            with self.assertRaisesRegex(ValueError, "the documents are not the step's: pass cu_seqlens [^;]*$"):
                evaluated()


class Flights(Alone):
    """In a job whose pool is this process."""

    def rows(self, count: int = 8) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(1)
        return [torch.randn(count, 2, 8, generator=draw).requires_grad_() for _ in range(3)]

    def test_rows_that_change_before_their_backward_are_refused_as_torch_does(self) -> None:
        self.join_itself()
        for early in (True, False):
            cadre.begin_step([3, 5])
            leaves = self.rows()
            q, k, v = (it * 1 for it in leaves)
            flight = cadre.submit(q, k, v)
            if early:
                k.add_(1)
            o, lse = cadre.wait(flight)
            if not early:
                v.mul_(3)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                (o.square().sum() + lse.sum()).backward()
            # Nothing was sent, and the next step is refused; the rest of the test begins anew.
            self.join_itself()
        # O is that of the rows as they were.
        cadre.begin_step([3, 5])
        with torch.no_grad():
            before = cadre.flash_attn_varlen_func(*self.rows(), None, None, 0, 0, causal=True)
        self.assertTrue(torch.equal(o, before))

    def test_the_calls_of_the_documentation_are_a_whole_step(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
        (code,) = (it for it in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "cadre.submit" in it)
        self.join_itself()
        xs = [torch.randn(it, 16).requires_grad_() for it in (8, 6)]
        leaves = list(xs)

        def qkv(x: torch.Tensor) -> list[torch.Tensor]:
            return [x.unflatten(1, (2, 8)) * it for it in (1, 2, 3)]

        layer = SimpleNamespace(qkv=qkv, rest=lambda x, o: x + o.flatten(1))
        exec(code, {"cadre": cadre, "layer": layer, "xs": xs, "layout": [3, 5], "other": [6], "loss_of": torch.sum})
        found = [it.grad for it in leaves]
        cadre.begin_step([1])
        for x, ends, gradient in zip(leaves, ([0, 3, 8], [0, 6]), found, strict=True):
            x, ends = x.detach().requires_grad_(), torch.tensor(ends)
            with cadre.local():
                o = cadre.flash_attn_varlen_func(*qkv(x), ends, ends, 0, 0, causal=True)
                layer.rest(x, o).sum().backward()
            self.assertTrue(torch.equal(x.grad, gradient))

    def test_a_micro_batch_without_documents_needs_no_call(self) -> None:
        self.join_itself()
        cadre.begin_step([[8], [], [8]])
        for at in (0, 2):
            with self.assertRaisesRegex(RuntimeError, "2 of 3 micro-batches were run|forward phases and 0 of 1 backw"):
                cadre.begin_step([8])
            cadre.wait(cadre.submit(*self.rows(), micro_batch=at))[0].sum().backward()
        self.assertTrue(cadre.begin_step([8]))

    def test_results_are_waited_for_in_the_order_whose_reverse_goes_backward(self) -> None:
        self.join_itself()
        cadre.begin_step([[8], [8]], turns="F0+1 B1+0")
        given = self.rows(), self.rows()
        flights = [cadre.submit(*it, micro_batch=at) for at, it in enumerate(given)]
        words = (
            "rank 0, step 0, micro-batch 1: wait for layer 0, and that for micro-batch 0 comes before, since autograd "
            r"goes backward in the reverse order .*\(the turns of the step are F0\+1 B1\+0\)"
        )
        with self.assertRaisesRegex(RuntimeError, words):
            cadre.wait(flights[1])
        sum(cadre.wait(it)[0].sum() for it in flights).backward()
        self.assertEqual([it.grad is None for both in given for it in both], [False] * 6)
        cadre.begin_step([[8], [8]], turns="F0+1 B0+1")
        given = self.rows(), self.rows()
        first, second = (cadre.submit(*it, micro_batch=at) for at, it in enumerate(given))
        with self.assertRaisesRegex(RuntimeError, "micro-batch 0: wait for layer 0, and that for micro-batch 1 comes"):
            cadre.wait(first)
        (cadre.wait(second)[0].sum() + cadre.wait(first)[0].sum()).backward()
        cadre.begin_step([1])

    def test_what_nobody_waited_for_is_named(self) -> None:
        for frozen in (0, 1):
            self.join_itself(frozen=frozen)
            cadre.begin_step([8])
            rows = [it.requires_grad_(not frozen) for it in self.rows()]
            flight = cadre.submit(*rows)
            words = "^rank 0, step 0: nobody waited for layer 0, which was submitted; call cadre.wait"
            with self.assertRaisesRegex(RuntimeError, words):
                cadre.begin_step([8])
            o, _ = cadre.wait(flight)
            if not frozen:
                o.sum().backward()
            self.assertTrue(cadre.begin_step([8]))

    def test_who_is_interrupted_in_a_wait_may_wait_again(self) -> None:
        self.join_itself()
        cadre.begin_step([8])
        flight = cadre.submit(*self.rows())
        with (
            mock.patch.object(type(_job.current().session), "wait", side_effect=KeyboardInterrupt),
            self.assertRaises(KeyboardInterrupt),
        ):
            cadre.wait(flight)
        o, _ = cadre.wait(flight)
        with self.assertRaisesRegex(ValueError, "it was waited for; submit again"):
            cadre.wait(flight)
        o.sum().backward()
        self.assertTrue(cadre.begin_step([8]))

    def test_each_half_is_behind_the_stream_that_it_runs_on(self) -> None:
        self.join_itself()
        cadre.begin_step([8])
        session, told, stream = _job.current().session, [], [1]

        def noted(name: str):
            plain = getattr(session, name)

            def call(*arguments: object, lent: object, **more: object) -> object:
                told.append((name, lent))
                return plain(*arguments, **more)

            return mock.patch.object(session, name, call)

        def moved(to: int):
            return lambda _: stream.__setitem__(0, to)

        with noted("submit"), noted("wait"), mock.patch.object(_place, "lent", lambda _: (0, stream[0])):
            flight = cadre.submit(*self.rows())
            stream[0] = 2
            o, lse = cadre.wait(flight)
            o.grad_fn.register_prehook(moved(3))
            o.grad_fn.next_functions[0][0].register_prehook(moved(4))
            (o.sum() + lse.sum()).backward()
        self.assertEqual(told, [("submit", (0, 1)), ("wait", (0, 2)), ("submit", (0, 3)), ("wait", (0, 4))])

    def test_numbers_that_are_only_marked_as_negative_have_their_sign(self) -> None:
        self.join_itself()
        cadre.begin_step([[8], [8]])
        found = []
        for marked in (torch.clone, lambda it: torch._neg_view(-it)):
            leaves = self.rows()
            o, lse = cadre.wait(cadre.submit(*(marked(it) for it in leaves), micro_batch=len(found)))
            gradients = [marked(torch.arange(float(it.numel())).view(it.shape)) for it in (o, lse)]
            found.append([o.detach(), lse.detach(), *torch.autograd.grad((o, lse), leaves, gradients)])
        for one, other in zip(*found, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_a_transform_of_functions_is_refused_by_its_name(self) -> None:
        self.join_itself()
        cadre.begin_step([8])
        q, k, _ = self.rows()
        for transform, words in ((torch.vmap, "torch.vmap makes several"), (torch.func.grad, "torch.func: attention")):
            with self.assertRaisesRegex(NotImplementedError, words):
                transform(lambda it: cadre.wait(cadre.submit(it, it, it))[0].sum())(torch.stack((q, k)).detach())

    def test_several_gradients_at_once_are_refused_by_name(self) -> None:
        self.join_itself()
        cadre.begin_step([8])
        rows = self.rows()
        o, _ = cadre.wait(cadre.submit(*rows))
        loss = o.square().sum()
        with self.assertRaisesRegex(NotImplementedError, "^rank 0: is_grads_batched .* torch.autograd.grad once for"):
            torch.autograd.grad(loss, rows, torch.ones(3), is_grads_batched=True, retain_graph=True)
        loss.backward()
        self.assertTrue(cadre.begin_step([8]))


class Places(unittest.TestCase):
    def test_a_backward_in_a_thread_of_autograds_is_under_local_as_its_caller_is(self) -> None:
        def innermost() -> tuple[bool, bool]:
            # As deep as that, torch goes on in a thread of its own, as it does for a GPU.
            nested(100, seen := [])
            ((thread, *said),) = seen
            self.assertNotEqual(thread, threading.get_ident())
            return tuple(said)

        other = contextvars.copy_context()
        for _ in range(2):
            self.assertEqual(innermost(), (False, False))
            with cadre.local():
                self.assertEqual(innermost(), (True, False))
                with cadre.local(whole=True):
                    self.assertEqual(innermost(), (True, True))
                self.assertEqual(innermost(), (True, False))
                # Another coroutine of this thread.
                self.assertFalse(other.run(_local.under_local))

    def test_what_is_said_of_local_lives_as_long_as_torch_holds_it(self) -> None:
        # Torch 2.9 takes objects of a thread without counting that it has them.
        for counts in (True, False):

            def stash(_key: str, it: object, counts: bool = counts) -> None:
                if counts:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(it))

            with mock.patch.object(torch._C, "_stash_obj_in_tls", stash):
                keep = _local.stash_of_torch()
                before = sys.getrefcount(said := object())
                keep(said)
                self.assertEqual(sys.getrefcount(said), before + 1, counts)

    def test_rows_have_the_type_that_is_said_or_autocasts_or_the_parameters(self) -> None:
        wide, narrow, none = (torch.nn.Linear(1, 1).to(it) for it in (torch.float32, torch.bfloat16, torch.float16))
        for model, said, expected in (
            (wide, None, torch.float32),
            (narrow, None, torch.bfloat16),
            (wide, torch.bfloat16, torch.bfloat16),
            (none, None, None),
            (cadre.Shape(2, 2, 8, ("causal",)), None, None),
        ):
            self.assertEqual(_layout.rows_of(model, said), expected)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(_layout.rows_of(wide, None), torch.bfloat16)
            self.assertEqual(_layout.rows_of(wide, torch.float32), torch.float32)
        with self.assertRaisesRegex(
            ValueError, "init: dtype is torch.float16; rows are torch.float32 or torch.bfloat16"
        ):
            _layout.rows_of(none, torch.float16)

    def test_who_computes_in_place_is_said_or_where_the_model_is(self) -> None:
        wide = torch.nn.Linear(1, 1)
        for device in ("gpu:0", -1, "meta"):
            with self.assertRaisesRegex(ValueError, f"init: device is '?{device}'?; say 'cpu', 'cuda' or"):
                _place.computes_on(device, wide, torch.bfloat16, [64])
        gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 2))
        there = mock.Mock(spec=torch.nn.Module, parameters=lambda: iter([gpu]))
        with mock.patch.object(_place, "_has_kernels", lambda number: number == 2):
            for expected, device, model, dtype, dims in (
                (None, "cpu", there, torch.bfloat16, [64]),
                (1, "cuda:1", wide, torch.float32, [8]),
                (2, None, there, torch.bfloat16, [64]),
                # No kernel of a GPU takes these.
                (None, None, there, torch.float32, [64]),
                (None, None, there, torch.bfloat16, [80]),
                (None, None, wide, torch.bfloat16, [64]),
                (None, None, cadre.Shape(2, 2, 64, ("causal",)), torch.bfloat16, [64]),
            ):
                self.assertEqual(_place.computes_on(device, model, dtype, dims), expected)
        for seen, number in ((0, 3), (1, 0), (4, 3)):
            with (
                mock.patch.dict(os.environ, {"LOCAL_RANK": "3"}),
                mock.patch.object(torch.cuda, "device_count", lambda seen=seen: seen),
            ):
                self.assertEqual(_place.computes_on("cuda", wide, None, []), number)

    def test_a_forked_child_computes_under_local_with_threads_of_its_own(self) -> None:
        before = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, before)
        torch.set_num_threads(2)
        q, ends = torch.randn(300, 2, 8), torch.tensor([0, 300], dtype=torch.int32)
        # The parent's threads are parked now, and none of them goes into the child.
        expected = cadre.flash_attn_varlen_func(q, q, q, ends, ends, 0, 0, causal=True)
        if (child := os.fork()) == 0:
            # One that hangs ends, too.
            signal.alarm(60)
            with cadre.local():
                found = cadre.flash_attn_varlen_func(q, q, q, ends, ends, 0, 0, causal=True)
            os._exit(0 if bytes(found.untyped_storage()) == bytes(expected.untyped_storage()) else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_rows_of_a_gpu_that_go_to_the_cpu_are_told_of_once_with_the_remedy(self) -> None:
        def call(dtype: torch.dtype, dim: int, number: int = 0) -> None:
            q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", number), dtype=dtype, shape=(8, 2, dim))
            self.assertEqual(_here.forward("causal", [8], q, q, q), "on the host")

        said = io.StringIO()
        _place._say_once.cache_clear()
        with (
            mock.patch.object(_place, "lent", lambda q: (q.device.index, 0)),
            mock.patch.object(_place, "on_host", lambda *_: "on the host"),
            mock.patch.object(_job, "_JOB", None),
            contextlib.redirect_stderr(said),
        ):
            with mock.patch.object(_frozen, "_WATCHED", []):
                call(torch.float32, 64)
            for _ in range(2):
                call(torch.float32, 64)
                call(torch.bfloat16, 80, number=1)
            with mock.patch.object(_job, "_JOB", SimpleNamespace(session=True, wire=torch.float32)):
                call(torch.bfloat16, 64)
        begin = "cadre: attention of tensors on GPU {} is computed on the CPU: its {}"
        rows = "rows are torch.float32, and kernels of GPUs take bfloat16; use "
        self.assertEqual(
            said.getvalue().splitlines(),
            [
                begin.format(0, rows + "torch.autocast('cuda', torch.bfloat16), or such a model"),
                begin.format(1, "head dim is 80; give the model one that kernels of GPUs have, 64, 128 or 256"),
                begin.format(0, rows + "spec.attention.wire: Bf16"),
            ],
        )


if __name__ == "__main__":
    unittest.main()
