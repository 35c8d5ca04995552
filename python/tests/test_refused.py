"""What no call of attention takes, and which layers no job has, in a process that no job has started."""

import unittest
from types import SimpleNamespace

import cadre
import torch
from test_operators import CU_SEQLENS, call, rows

NAN = float("nan")
WIDTHS = (
    "heads of {} are {} wide and those of q {}: all three are of one width here. Pad .* to the widest with zeros, give "
    "the scale of yours, and cut O to the width of V; or leave such layers their own attention"
)


class Calls(unittest.TestCase):
    def test_what_is_not_there_is_refused_by_its_name(self) -> None:
        q, k, v = rows()
        for more, words in (
            ({"dropout_p": 0.1}, "dropout_p is 0.1"),
            ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes is a tensor"),
            ({"block_table": torch.zeros(4)}, "block_table is a tensor"),
            ({"window_size": (3, 3), "causal": False}, r"window_size \(3, 3\) with causal=False"),
            ({"window_size": (3, -1), "causal": False}, r"window_size \(3, -1\)"),
            ({"window_size": (-1, 5), "causal": False}, r"window_size \(-1, 5\)"),
        ):
            with self.assertRaisesRegex(NotImplementedError, words):
                call(q, k, v, **more)
        for arguments, error, words in (
            ((q.double(), k.double(), v.double()), TypeError, "q is torch.float64"),
            ((q, k.bfloat16(), v), TypeError, "k is torch.bfloat16 and q torch.float32"),
            ((q, k, v[0]), ValueError, "v is "),
            ((q, k, v[..., :8]), NotImplementedError, WIDTHS.format("v", 8, 16)),
            ((q, k[..., :8], v), NotImplementedError, WIDTHS.format("k", 8, 16)),
            ((q, k[:5], v[:5]), ValueError, r"K is \[5, 2, 16\], not"),
            ((q, k, v.to("meta")), NotImplementedError, "v is on meta"),
            ((q, k, [1.0]), TypeError, "v is a list; give a tensor"),
            ((q, k, torch._efficientzerotensor(161, 2, 16)), ValueError, "V has no memory.* autograd makes .clone"),
            ((q.detach().to_sparse(), k, v), NotImplementedError, "q is a tensor of layout torch.sparse_coo;"),
            ((q, torch.nested.nested_tensor([k]), v), NotImplementedError, r"k is .* \(nested\); .* and cu_seqlens"),
            ((q[:150], k[:150], v[:150]), ValueError, "cu_seqlens_q ends at 161 and q has 150 rows; give"),
        ):
            with self.assertRaisesRegex(error, words):
                call(*arguments)
        # Torch would take ends elsewhere for a question of shapes, and return memory that nobody wrote.
        for ends, error, words in (
            (CU_SEQLENS.to("meta"), NotImplementedError, "cu_seqlens_q is on meta"),
            (CU_SEQLENS.tolist(), TypeError, "cu_seqlens_q is a list; give a tensor"),
            (torch.tensor([False, True]), ValueError, "of torch.bool; give integers"),
        ):
            with self.assertRaisesRegex(error, words):
                cadre.flash_attn_varlen_func(q, k, v, ends, ends, 130, 130)
        none = [it[:0] for it in (q, k, v)]
        for ends in (CU_SEQLENS, torch.tensor([0, 5]), torch.tensor([0, 0])):
            with self.assertRaisesRegex(ValueError, r"cu_seqlens_. is \[.*, and q, k and v have no rows"):
                cadre.flash_attn_varlen_func(*none, ends, ends, 1, 1)
        with self.assertRaisesRegex(TypeError, r"layer is 3; .* torch.tensor\(3\)"):
            call(q, k, v, layer=3)
        with self.assertRaisesRegex(TypeError, "sinks are a list; give a tensor"):
            call(q, k, v, sinks=[0.0] * 4)
        for window in (3, (None, None), (1, 2, 3)):
            with self.assertRaisesRegex(TypeError, "window_size is .* give the rows to the left and to the right"):
                call(q, k, v, window_size=window)
        with self.assertRaisesRegex(NotImplementedError, "cu_seqlens_q and cu_seqlens_k differ"):
            cadre.flash_attn_varlen_func(q, k, v, CU_SEQLENS, CU_SEQLENS + 1, 130, 130)

    def test_what_no_server_computes_is_refused_by_flashattentions_names(self) -> None:
        three = [it.detach() for it in rows()]
        for more, words in (
            *(({"softmax_scale": it}, "softmax_scale is .*2.-20 to 2.20") for it in (0.0, -1.0, NAN, 2.0**-21, "1")),
            *(({"softcap": it}, "softcap is .*2.-20 to 2.20") for it in (-1.0, NAN, 2.0**21, "1")),
            *(({"chunk": it}, "chunk is .* 1 or more") for it in (0, -3, 2.5, 1 << 32)),
            *(({"window_size": (it, 0)}, "window_size .* below 2.32") for it in (-2, 1 << 32)),
        ):
            with self.assertRaisesRegex(ValueError, f"^{words}"):
                call(*three, **more)
        for dim in (0, 4, 100, 264):
            with self.assertRaisesRegex(ValueError, f"^head dim of q is {dim}; .* multiple of 8 up to 256: pad"):
                call(*(it[..., :1].expand(-1, -1, dim) for it in three))
        for heads, kv_heads in ((4, 3), (0, 2), (4, 0)):
            q, k, v = (three[0][:, :1].expand(-1, it, -1) for it in (heads, kv_heads, kv_heads))
            with self.assertRaisesRegex(ValueError, f"^q has {heads} heads and k {kv_heads}; give q a multiple"):
                call(q, k, v)
        # Rows behind the last document, as a static shape has them.
        padded = [torch.cat((it, it[:3])) for it in three]
        with self.assertRaisesRegex(ValueError, r"^cu_seqlens_q ends at 161 and q has 164 rows; .* \(padding\)"):
            call(*padded)
        # The bounds themselves are taken.
        for more in ({"softmax_scale": 2.0**20}, {"softcap": 2.0**-20}, {"window_size": ((1 << 32) - 1, 0)}):
            call(*three, **more)


class Layers(unittest.TestCase):
    def test_layers_that_no_job_has_are_refused_without_a_job(self) -> None:
        for mask in ("causl", "window:-3", "window:0", "window:", "chunk:0", "causal scale nan", f"window:{1 << 33}"):
            with self.assertRaisesRegex(ValueError, f"^Shape: layer 1: .*{mask}.*; (write|say) 'causal', 'full'"):
                cadre.Shape(2, 2, 8, ("causal", mask))
        for more, words in (
            ({"mask": "chunk:8"}, "mask is 'chunk:8'; .* chunk= for chunks"),
            ({"chunk": 0}, "chunk is 0"),
            ({"scale": -1.0}, "scale is -1.0; give a number from"),
            ({"scale": NAN}, "scale is nan"),
            ({"softcap": 2.0**21}, "softcap is"),
            ({"heads": (3,)}, r"heads is \(3,\); give query heads and KV heads"),
        ):
            with self.assertRaisesRegex(ValueError, f"^Kind: {words}"):
                cadre.Kind(**more)
        for arguments, words in (
            ((3, 2, 8, ("causal",)), "layer 0: query_heads is 3 and kv_heads 2; give each KV head as many"),
            ((0, 2, 8, ("causal",)), "layer 0: query_heads is 0; give a whole number from 1"),
            ((2, 0, 8, ("causal",)), "layer 0: kv_heads is 0"),
            ((2, 2.0, 8, ("causal",)), "layer 0: kv_heads is 2.0"),
            ((2, 2, 13, ("causal",)), "layer 0: head_dim is 13; heads have a multiple of 8 up to 256"),
            ((2, 2, 264, ("causal",)), "layer 0: head_dim is 264"),
            ((2, 2, 8, ("causal", cadre.Kind(heads=(4, 3)))), "layer 1: query_heads is 4 and kv_heads 3"),
            ((2, 2, 8, ("causal", cadre.Kind(head_dim=0))), "layer 1: head_dim is 0"),
            ((2, 2, 8, ()), "0 layers have kinds; a job has 1 to 65535"),
            ((2, 2, 8, ("causal",) * 2, 3), "frozen is 3 of 2 layers"),
        ):
            with self.assertRaisesRegex(ValueError, f"^Shape: {words}"):
                cadre.Shape(*arguments)
        for kinds, words in (("causal", "kinds is 'causal'; give one for each"), ((3,), "layer 0: its kind is a int")):
            with self.assertRaisesRegex(TypeError, f"^Shape: {words}"):
                cadre.Shape(2, 2, 8, kinds)

    def test_a_model_of_transformers_has_the_same_bounds(self) -> None:
        bare = {"num_attention_heads": 3, "num_hidden_layers": 1, "hidden_size": 24, "num_key_value_heads": 2}
        model = SimpleNamespace(config=SimpleNamespace(**bare))
        with self.assertRaisesRegex(ValueError, "^Shape: layer 0: query_heads is 3 and kv_heads 2"):
            cadre.init(model, steps=1)


if __name__ == "__main__":
    unittest.main()
