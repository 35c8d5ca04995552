"""What a forward leaves for its recompute (activation checkpointing): O and LSE, and samples of Q, K and V.

In: the inputs and results of a layer's forward. Out: the results again, or a refusal where the inputs are others.
"""

import torch


def is_repeated() -> bool:
    """Whether autograd may call a forward that is called now again: inside a checkpoint it keeps nothing itself. One
    without reentrance puts hooks before what is saved, a reentrant one takes gradients away, as Megatron's does. What
    is compiled is not asked: its own checkpoints are not seen from outside."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


NAME_IT = (
    "where one checkpoint holds several layers, pass layer=, the layer's number in a tensor, or give init the model of "
    "transformers"
)
"""The remedy where nothing says which layer is computed again."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K and V."""


class Kept:
    """O and LSE of a forward, for a recompute (activation checkpointing): it sends nothing.

    They are copies: a compiled model writes into memory that it does not need any more, and says so to nobody.
    """

    def __init__(self, inputs: Inputs, *results: torch.Tensor) -> None:
        self.samples = _samples(inputs)
        self.results = [it.detach().clone() for it in results]

    def again(self, inputs: Inputs, where: str, *, is_named: bool = True) -> list[torch.Tensor]:
        """The results, for the same inputs. `is_named`: whether the call said which layer it repeats."""
        for name, one, other in zip("qkv", self.samples, _samples(inputs), strict=True):
            # Another order of sums may have changed the last bits.
            # What is not finite was reported, and is the same again.
            size = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
            if not torch.allclose(one, other, rtol=1e-2, atol=1e-2 * size, equal_nan=True):
                raise RuntimeError(
                    f"{where}: {name} of a forward in the backward is not that of the layer's first one; "
                    f"{'' if is_named else NAME_IT + '; '}attention that is no recompute belongs under cadre.local(), "
                    "and a recompute needs the same random numbers"
                )
        return [it.clone() for it in self.results]


def _samples(inputs: Inputs) -> list[torch.Tensor]:
    """Some elements from all over each tensor."""
    return [it.detach().flatten()[:: it.numel() // 256 | 1].float() for it in inputs]
