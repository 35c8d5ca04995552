"""The step that runs: its micro-batches, which of its calls is next, and what a call may be.

In: layouts, calls of attention. Out: the phase that a call is, or a refusal that names rank, step and remedy; a call
that is refused changes nothing. It knows no session.

A micro-batch goes forward layer by layer, and backward in reverse, as its turns come: the next one may go forward
before. Layers that are frozen have no backward. One of which the rank has no documents has no phases here.
"""

import time

import torch

from ._kept import NAME_IT, Kept
from ._kind import same_on
from ._layout import Shape, Stretch
from ._turns import Turn, in_words, order_of

# More micro-batches than a step can have: the session counts them in 16 bits.
_MICRO_BATCHES = 1 << 16
_NOT_AGAIN = "; a step is not tried again after an exception in it: let that end the process"


class Step:
    """See the module. Without a pool it only counts the forwards that take its documents."""

    def __init__(
        self,
        where: tuple[int, int],
        shape: Shape,
        layouts: list[list[Stretch]],
        *,
        pooled: bool,
        order: list[Turn] | None = None,
    ) -> None:
        self.rank, self.number = where
        self.shape, self.layouts, self.pooled = shape, layouts, pooled
        # Each call asks for them.
        self._lengths = [[it.end - it.start for it in layout] for layout in layouts]
        self.order = order or order_of(None, len(layouts))
        self.in_flight = self.order != order_of(None, len(layouts))
        """Whether a micro-batch goes forward before the backward of the one before."""
        self.spans = False
        """Whether a check has documents that go on in other ranks."""
        self.began = time.monotonic()
        self.at = 0
        """The micro-batch that forwards are of."""
        self.forward = [0] * len(layouts)
        """Phases of each that the pool was asked for, or calls here that took its documents; `backward` likewise."""
        self.backward = [0] * len(layouts)
        self.kept: dict[tuple[int, int], Kept] = {}
        """By micro-batch and layer, until its backward."""
        self.recomputed: dict[int, int] = {}
        """By micro-batch, the layer that a call without a layer's number was taken for last, in a backward."""
        self.tasks: dict[int, int] = {}
        """Micro-batches of autograd's backwards."""
        self.flights: set[tuple[int, int]] = set()
        """Forwards that were submitted, and that nobody has waited for: by micro-batch and layer."""
        self.loss, self.gradient_norm, self.learning_rate = 0.0, 0.0, 0.0
        self.validation_loss: float | None = None
        self.tokens: int | None = None

    @property
    def layers(self) -> int:
        return len(self.shape.kinds)

    @property
    def backwards(self) -> int:
        """Layers that have a backward."""
        return self.layers - self.shape.frozen

    def due(self, until: int | None = None) -> tuple[str, int] | None:
        """The way and micro-batch that run or come next; none at the end of the step, or if `until` goes forward in it
        or before. In a turn of several, each goes through a layer before the next layer comes."""
        for way, these in self.order:
            if way == "F" and until in these:
                return None
            called, phases = (self.forward, self.layers) if way == "F" else (self.backward, self.backwards)
            left = [at for at in these if self.layouts[at] and called[at] < phases]
            if left:
                return way, min(left, key=lambda at: called[at])
        return None

    def may_be_empty(self) -> bool:
        """Whether calls may have no rows: the current micro-batch has no documents, or in a recompute any."""
        again = torch._C._current_graph_task_id() != -1
        return not (all(self.layouts) if again else self.layouts[self.at])

    def lengths(self, at: int | None = None) -> list[int]:
        """Rows of each stretch of a micro-batch, by default of the current one."""
        return self._lengths[self.at if at is None else at]

    def rows(self) -> int:
        """Rows of this rank in all micro-batches."""
        return sum(map(sum, self._lengths))

    def where(self, at: int | None = None) -> str:
        told = f"rank {self.rank}, step {self.number}"
        return told if len(self.layouts) == 1 else f"{told}, micro-batch {self.at if at is None else at}"

    def key(self) -> int:
        """Number of the current micro-batch, counted over all steps."""
        return self.number * _MICRO_BATCHES + self.at

    @staticmethod
    def of_key(key: int) -> tuple[int, int]:
        """Step and micro-batch of such a number."""
        return divmod(key, _MICRO_BATCHES)

    def missing(self, at: int) -> str | None:
        """What a micro-batch still lacks."""
        forward, backward = self.forward[at], self.backward[at]
        if flying := [layer for of, layer in self.flights if of == at]:
            return (
                f"{self.where(at)}: nobody waited for layer {min(flying)}, which was submitted; call cadre.wait with "
                "what cadre.submit returned"
            )
        if not self.pooled or not self.layouts[at] or (forward, backward) == (self.layers, self.backwards):
            return None
        return (
            f"{self.where(at)}: {forward} of {self.layers} forward phases and {backward} of {self.backwards} "
            f"backward phases were called; it is over when all were{self.in_order()}"
        )

    def refuse_unknown_recompute(self) -> None:
        """Refuses a recompute in this process whose call names no documents."""
        if self.in_flight and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "a recompute where micro-batches are in flight, and nothing says of which one: pass cu_seqlens "
                "(cu_seq_lens_q)"
            )

    def refuse_further(self) -> None:
        """Refuses a forward in this process that would take documents which all layers have taken already."""
        if self.forward[self.at] >= self.layers and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"{self.where()}: all {self.layers} forward calls have taken the step's documents; begin the next "
                "micro-batch or step, or pass cu_seqlens (cu_seq_lens_q), or evaluate under cadre.local()"
            )

    def count_further(self) -> None:
        """A forward in this process has taken the documents; a recompute takes them again."""
        if torch._C._current_graph_task_id() == -1:
            self.forward[self.at] += 1

    @staticmethod
    def next_in_words(due: tuple[str, int] | None) -> str:
        return f"the turn of {due[0]}{due[1]}" if due else "the end of the step"

    def in_order(self) -> str:
        return f" (the turns of the step are {in_words(self.order)})" if self.in_flight else ""

    def unfinished(self) -> str | None:
        """What the step still lacks."""
        count = len(self.layouts)
        # What `submit` names needs no `next_micro_batch`, and what has no documents no call.
        begun = [at for at in range(count) if at <= self.at or self.forward[at] or not self.layouts[at]]
        for at in begun:
            if missing := self.missing(at):
                return missing
        if self.pooled and len(begun) < count:
            return (
                f"rank {self.rank}, step {self.number}: {len(begun)} of {count} micro-batches were run; call "
                "next_micro_batch before each of the others, or submit with micro_batch="
            )
        return None

    def advance(self) -> None:
        """Goes on to the next micro-batch."""
        if self.at + 1 == len(self.layouts):
            raise RuntimeError(f"{self.where()}: it is the last micro-batch of the step; call begin_step")
        if self.pooled and (due := self.due(until=self.at + 1)):
            raise RuntimeError(self.missing(due[1]))
        self.at += 1
        # What frozen layers have kept has no backward that would take it away.
        over = {at for at in range(self.at) if self.missing(at) is None}
        self.kept = {phase: it for phase, it in self.kept.items() if phase[0] not in over}

    def forward_phase(
        self,
        kind: str,
        lengths: list[int] | None,
        shapes: list[tuple[int, ...]],
        named: int | None,
        at: int | None = None,
    ) -> tuple[tuple[int, int], Kept | None]:
        """Micro-batch and layer whose turn it is, or which are recomputed, and what their forward came to; refuses what
        is not the announced one's."""
        shape, layers, at = self.shape, self.layers, self.at if at is None else at
        # Autograd is at work in this thread: a forward there is a recompute.
        is_again = (task := torch._C._current_graph_task_id()) != -1
        if is_again:
            at = self.recomputed_micro_batch(task)
        where = self.where(at)
        if is_again:
            layer = self.recomputed_layer(at, named)
        elif (layer := self.forward[at]) == layers:
            raise RuntimeError(
                f"{where}: all {layers} forward phases were called; begin the next micro-batch or step, or evaluate "
                f"under cadre.local(){_NOT_AGAIN}"
            )
        elif named not in (None, layer):
            again = _NOT_AGAIN if named < layer else ""
            raise ValueError(f"{where}: layer {named} is called, and it is the turn of layer {layer}{again}")
        if not self.layouts[at]:
            raise ValueError(f"{where}: it was announced without documents, and q is {shapes[0]}")
        if self.in_flight and not is_again and (due := self.due()) != ("F", at):
            raise RuntimeError(
                f"{where}: forward of layer {layer}, and {self.next_in_words(due)} comes before{self.in_order()}"
            )
        told = str(shape.kinds[layer])
        if kind != told and not same_on(max(it.rows for it in self.layouts[at]), kind, told):
            raise ValueError(f"{where}: layer {layer} is {told} and the call is {kind}; call layers in order")
        announced = self.lengths(at)
        if lengths is not None and lengths != announced:
            raise ValueError(
                f"{where}: cu_seqlens say {lengths}, announced were {announced}; pass those of the batch, or evaluate "
                "under cadre.local()"
            )
        rows, (heads, kv_heads, dim) = sum(announced), shape.heads[layer]
        wanted = [(rows, heads, dim), *[(rows, kv_heads, dim)] * 2]
        for name, found, expected in zip("qkv", shapes, wanted, strict=True):
            if found != expected:
                raise ValueError(
                    f"{where}, layer {layer}: {name} is {found}, announced was {expected}; give the batch's rows, or "
                    "evaluate under cadre.local()"
                )
        return (at, layer), self.kept[at, layer] if is_again else None

    def recomputed_micro_batch(self, task: int) -> int:
        """The micro-batch that a backward of autograd belongs to: the current one when the backward began."""
        if task in self.tasks:
            return self.tasks[task]
        way, at = self.due() or ("F", self.at)
        if way == "F":
            # Refused: its forward is not complete, or its backward is over.
            return self.at
        self.tasks[task] = at
        return at

    def recomputed_layer(self, at: int, named: int | None) -> int:
        """Which layer's forward a call in a backward repeats. A call without a layer's number is the one whose backward
        is next, which a segment of one layer is."""
        layers, turn, where = self.layers, self.layers - 1 - self.backward[at], self.where(at)
        before = self.recomputed.get(at)
        if turn < self.shape.frozen and before is not None and before <= turn:
            # No backward comes between those of frozen layers.
            turn = before - 1
        if self.forward[at] < layers:
            raise RuntimeError(
                f"{where}: a recompute after {self.forward[at]} of {layers} forward phases; call backward when all "
                "layers are forward"
            )
        layer = turn if named is None else named
        if layer > turn or layer < 0:
            raise RuntimeError(f"{where}: layer {max(layer, 0)} is recomputed, and its backward is over")
        if (at, layer) not in self.kept:
            raise RuntimeError(
                f"{where}: layer {layer} is called in a backward, and its first call was inside of no checkpoint, so "
                "that nothing is kept for it; checkpoint with torch.utils.checkpoint, or evaluate under cadre.local()"
            )
        if named is None:
            if before == turn:
                raise RuntimeError(
                    f"{where}: two forwards are recomputed before the backward of layer {turn}, and nothing says of "
                    f"which layers; {NAME_IT}; or checkpoint each layer by itself"
                )
            self.recomputed[at] = turn
        return layer

    def end_flight(self, at: int, layer: int) -> None:
        """The results of a submitted forward are waited for. Refuses it where autograd, which goes backward in the
        reverse order, would come to another micro-batch than the turn of the backward."""
        together = next((these for way, these in self.order if way == "B" and at in these), ())
        before = together[together.index(at) + 1 :] if at in together and layer >= self.shape.frozen else ()
        for other in reversed(before):
            if self.layouts[other] and (self.forward[other] <= layer or (other, layer) in self.flights):
                raise RuntimeError(
                    f"{self.where(at)}: wait for layer {layer}, and that for micro-batch {other} comes before, since "
                    f"autograd goes backward in the reverse order{self.in_order()}; wait for it first, or begin the "
                    "step with other turns"
                )
        self.flights.discard((at, layer))

    def ticket(self, at: int, layer: int) -> int:
        """Number of a phase, counted over all steps."""
        return (self.number * _MICRO_BATCHES + at) * self.layers + layer

    def backward_phase(self, at: int, layer: int) -> None:
        """Refuses a backward that is not the next one."""
        layers, where = self.layers, f"{self.where(at)}: backward of layer {layer}"
        if self.forward[at] < layers:
            raise RuntimeError(
                f"{where}, after {self.forward[at]} of {layers} forward phases; call backward when all layers are "
                "forward"
            )
        if layer < self.shape.frozen:
            raise RuntimeError(
                f"{where}, which was announced to have none; freeze parameters and enable checkpointing before init, "
                f"or give it a cadre.Shape with frozen={layer}"
            )
        turn = layers - 1 - self.backward[at]
        if layer > turn:
            raise RuntimeError(f"{where}, for a second time; a step has one backward (leave retain_graph out)")
        if layer < turn:
            raise RuntimeError(
                f"{where}, and it is the turn of layer {turn}; the loss depends on all layers, in their order"
            )
        due = self.due()
        if due != ("B", at):
            raise RuntimeError(f"{where}, and {self.next_in_words(due)} comes before{self.in_order()}")
        self.tasks[torch._C._current_graph_task_id()] = at
