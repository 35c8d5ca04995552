"""First layers of a model that have no backward, since nothing before their attention is trained.

In: a model of transformers and its shape. Out: the shape with how many they are, as a forward of two tokens shows.
"""

import dataclasses
from typing import Any

import torch

from ._layout import Shape, inside
from ._local import local

_WATCHED: list[bool] | None = None


def watched() -> list[bool] | None:
    """A list to which calls add whether they have a gradient, while `init` looks for frozen layers."""
    return _WATCHED


def with_frozen(model: Any, shape: Shape) -> Shape:
    """The shape, with the number of first layers that have no backward."""
    global _WATCHED
    if not is_partly_frozen(model):
        return shape
    _WATCHED = []
    try:
        with local():
            frozen = frozen_of(model, _WATCHED, len(shape.kinds))
    finally:
        _WATCHED = None
    return dataclasses.replace(shape, frozen=frozen)


def is_partly_frozen(model: Any) -> bool:
    """Whether some parameters of a model are not trained, so that its first layers may have no backward."""
    return isinstance(model, torch.nn.Module) and not all(it.requires_grad for it in model.parameters())


def frozen_of(model: torch.nn.Module, watched: list[bool], layers: int) -> int:
    """How many first layers have no backward, as a forward of two tokens shows: adapters and hooks decide it too.
    `watched` gets whether Q, K or V of each call has a gradient."""
    model = inside(model)
    if any(it.is_meta for it in model.parameters()):
        raise NotImplementedError(
            "init: the model is on the meta device and partly frozen; call init when it has its weights"
        )
    training = [(it, it.training) for it in model.modules()]
    ends = torch.tensor([0, 2], dtype=torch.int32, device="cpu")
    try:
        # Neither dropout nor checkpoints.
        model.eval()
        with torch.enable_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64, device=_device_of_tokens(model))
            model(input_ids=ids, use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    finally:
        for it, was in training:
            it.training = was
    if len(watched) != layers or watched != sorted(watched):
        raise NotImplementedError(
            f"init: layers have a backward as {watched}; give a cadre.Shape, whose frozen says how many first ones "
            "have none"
        )
    return watched.count(False)


def _device_of_tokens(model: torch.nn.Module) -> torch.device:
    """Where the model looks its tokens up."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return next((model if embedding is None else embedding).parameters()).device
