"""The step that runs: its micro-batches, which of its calls is next, and what a call may be.

In: layouts, calls of attention. Out: the phase that a call is, or a refusal that names rank, step and remedy; a call
that is refused changes nothing. It knows no session.

A micro-batch goes forward layer by layer, then backward in reverse, then the next one does. Layers that are frozen
have no backward.
"""

import time

import torch

from ._kept import Kept
from ._layout import Shape, Stretch

# More micro-batches than a step can have: the session counts them in 16 bits.
_MICRO_BATCHES = 1 << 16


class Step:
    """See the module. Phases are counted where the step is the pool's alone."""

    def __init__(self, where: tuple[int, int], shape: Shape, layouts: list[list[Stretch]], *, pooled: bool) -> None:
        self.rank, self.number = where
        self.shape, self.layouts, self.pooled = shape, layouts, pooled
        self.spans = False
        """Whether a check has documents that go on in other ranks."""
        self.began = time.monotonic()
        self.at = 0
        """The micro-batch that runs."""
        self.forward = 0
        """Its phases that the pool was asked for; `backward` likewise."""
        self.backward = 0
        self.kept: dict[int, Kept] = {}
        """By layer, until its backward."""
        self.recomputed: int | None = None
        """The layer that a call without a layer's number was taken for last, in a backward."""
        self.loss, self.gradient_norm, self.learning_rate = 0.0, 0.0, 0.0
        self.validation_loss: float | None = None
        self.tokens: int | None = None

    @property
    def layers(self) -> int:
        return len(self.shape.kinds)

    def lengths(self, at: int | None = None) -> list[int]:
        """Rows of each stretch of a micro-batch, by default of the one that runs."""
        return [it.end - it.start for it in self.layouts[self.at if at is None else at]]

    def whole(self) -> bool:
        """Whether every document of the micro-batch lies whole on this rank."""
        return all(it.end - it.start == it.rows for it in self.layouts[self.at])

    def rows(self) -> int:
        """Of this rank, in all micro-batches."""
        return sum(it.end - it.start for layout in self.layouts for it in layout)

    def where(self, at: int | None = None) -> str:
        told = f"rank {self.rank}, step {self.number}"
        return told if len(self.layouts) == 1 else f"{told}, micro-batch {self.at if at is None else at}"

    def key(self) -> int:
        """Number of the micro-batch that runs, in all steps."""
        return self.number * _MICRO_BATCHES + self.at

    @staticmethod
    def of_key(key: int) -> tuple[int, int]:
        """Step and micro-batch."""
        return divmod(key, _MICRO_BATCHES)

    def missing(self) -> str | None:
        """What the micro-batch that runs lacks to be over."""
        backwards = self.layers - self.shape.frozen
        if not self.pooled or (self.forward, self.backward) == (self.layers, backwards):
            return None
        return (
            f"{self.where()}: {self.forward} of {self.layers} forward phases and {self.backward} of {backwards} "
            "backward phases were called; it is over when all were"
        )

    def unfinished(self) -> str | None:
        """What the step lacks to be over."""
        begun, count = self.at + 1, len(self.layouts)
        if (missing := self.missing()) is None and self.pooled and begun < count:
            return (
                f"rank {self.rank}, step {self.number}: {begun} of {count} micro-batches were run; call "
                "next_micro_batch before each of the others"
            )
        return missing

    def advance(self) -> None:
        """To the next micro-batch."""
        if self.at + 1 == len(self.layouts):
            raise RuntimeError(f"{self.where()}: it is the last micro-batch of the step; call begin_step")
        if missing := self.missing():
            raise RuntimeError(missing)
        self.at += 1
        self.forward = self.backward = 0
        self.kept.clear()
        self.recomputed = None

    def forward_phase(
        self, kind: str, lengths: list[int] | None, shapes: list[tuple[int, ...]], named: int | None
    ) -> tuple[int, Kept | None]:
        """The layer whose turn it is, or which one is recomputed, and what its forward came to; refuses what is not the
        announced one's."""
        shape, layers, where = self.shape, self.layers, self.where()
        # Autograd is at work in this thread: a forward there is a recompute.
        is_again = torch._C._current_graph_task_id() != -1
        if is_again:
            layer = self.recomputed_layer(named)
        elif (layer := self.forward) == layers:
            raise RuntimeError(
                f"{where}: all {layers} forward phases were called; begin the next micro-batch or step, or evaluate "
                "under cadre.local()"
            )
        elif named not in (None, layer):
            raise ValueError(f"{where}: layer {named} is called, and it is the turn of layer {layer}")
        if kind != shape.kinds[layer]:
            raise ValueError(
                f"{where}: layer {layer} is {shape.kinds[layer]} and the call is {kind}; call layers in order"
            )
        announced = self.lengths()
        if lengths is not None and lengths != announced:
            raise ValueError(f"{where}: cu_seqlens say {lengths}, announced were {announced}; pass those of the batch")
        rows, dim = sum(announced), shape.head_dim
        wanted = [(rows, shape.query_heads, dim), *[(rows, shape.kv_heads, dim)] * 2]
        for name, found, expected in zip("qkv", shapes, wanted, strict=True):
            if found != expected:
                raise ValueError(f"{where}, layer {layer}: {name} is {found}, announced was {expected}")
        return layer, self.kept[layer] if is_again else None

    def recomputed_layer(self, named: int | None) -> int:
        """Which layer's forward a call in a backward repeats. A call without a layer's number is the one whose backward
        is next, which a segment of one layer is."""
        layers, turn, where = self.layers, self.layers - 1 - self.backward, self.where()
        if turn < self.shape.frozen and self.recomputed is not None and self.recomputed <= turn:
            # No backward comes between those of frozen layers.
            turn = self.recomputed - 1
        if self.forward < layers:
            raise RuntimeError(
                f"{where}: a recompute after {self.forward} of {layers} forward phases; call backward when all layers "
                "are forward"
            )
        layer = turn if named is None else named
        if layer > turn or layer < 0:
            raise RuntimeError(f"{where}: layer {max(layer, 0)} is recomputed, and its backward is over")
        if layer not in self.kept:
            raise RuntimeError(
                f"{where}: layer {layer} is called in a backward, and its first call was inside of no checkpoint, so "
                "that nothing is kept for it; checkpoint with torch.utils.checkpoint, or evaluate under cadre.local()"
            )
        if named is None:
            if self.recomputed == turn:
                raise RuntimeError(
                    f"{where}: two forwards are recomputed before the backward of layer {turn}, and nothing says of "
                    "which layers; checkpoint each layer by itself, or give init the model of transformers"
                )
            self.recomputed = turn
        return layer

    def ticket(self, layer: int) -> int:
        """Number of a phase of the micro-batch that runs, in all steps."""
        return self.key() * self.layers + layer

    def backward_phase(self, key: int, layer: int) -> None:
        """Refuses what is not the next backward."""
        _, at = self.of_key(key)
        layers, where = self.layers, f"{self.where(at)}: backward of layer {layer}"
        if at != self.at:
            raise RuntimeError(f"{where}, while micro-batch {self.at} runs; call backward before the next micro-batch")
        if self.forward < layers:
            raise RuntimeError(
                f"{where}, after {self.forward} of {layers} forward phases; call backward when all layers are forward"
            )
        if layer < self.shape.frozen:
            raise RuntimeError(
                f"{where}, which was announced to have none; freeze parameters and enable checkpointing before init, "
                f"or give it a cadre.Shape with frozen={layer}"
            )
        turn = layers - 1 - self.backward
        if layer > turn:
            raise RuntimeError(f"{where}, for a second time; a step has one backward (leave retain_graph out)")
        if layer < turn:
            raise RuntimeError(
                f"{where}, and it is the turn of layer {turn}; the loss depends on all layers, in their order"
            )
