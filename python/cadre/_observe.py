"""Lengths and step times of a job that does not use Cadre, as a file: what `cadre observe report` reads.

In: a model that is trained, whatever trains it. Out: a file of JSON lines for each rank; the first one says the model
and the ranks, each further one a step. Nothing is computed otherwise than before, and nothing is sent.

A step is the forwards with gradients between two calls of an optimizer's `step`, each once: neither what a checkpoint
computes again, nor what was tried again after an exception. One of more than `FORWARDS` is not logged: what is kept
would grow for good where no optimizer of torch makes a step. Documents are found in what the model is called with. What
lies on a GPU is copied there without waiting, and read when the step after it ends.

The job goes on whatever happens here: a step whose documents are not known is not logged, and where the file takes no
more lines no further step is. Each of these is said once on stderr.
"""

import atexit
import contextlib
import dataclasses
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from ._kept import is_repeated
from ._layout import Shape, differences

VERSION = 1
FORWARDS = 4096
"""Maximum forwards of a step that is logged."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with."""

# What frameworks call the ends of packed documents, their positions, and tokens.
_ENDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
_POSITIONS = ("position_ids", "positions")
_TOKENS = ("input_ids", "tokens", "input", "inputs_embeds")


def observe(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    shape: Shape | None = None,
    ranks: tuple[int, int] | None = None,
    layout: Callable[..., list[int]] | None = None,
) -> "Observer":
    """Writes the lengths and times of each step of `model` to `folder`/rank-RANK.jsonl, until `close` or the end.

    `shape`: the model's layers, where it has no configuration of transformers. `ranks`: the number of this rank and how
    many there are, among those that hold other documents (default: those of torch.distributed). `layout` says the
    lengths of the documents in a forward, from its arguments, where the names of these do not say it.
    """
    return Observer(model, Path(folder), shape, ranks or _ranks(), layout)


class Forward:
    """A forward with gradients: its documents, when it began, and whether its backward has yet to end."""

    def __init__(self, documents: Callable[[], list[int]]) -> None:
        self.documents, self.began = documents, time.perf_counter()
        self.seconds, self.waits = 0.0, False

    def end(self, results: Any) -> None:
        self.seconds = time.perf_counter() - self.began
        for it in within(results):
            if isinstance(it, Tensor) and it.requires_grad:
                it.register_hook(self._backward)
                self.waits = True

    def _backward(self, _: Tensor) -> None:
        # Called at the end of the backward, and not where that ends with an exception.
        torch.autograd.Variable._execution_engine.queue_callback(self._done)

    def _done(self) -> None:
        self.waits = False


def within(results: Any) -> list[Any]:
    """What a model returned, out of its container. Nothing else is looked into: a generator can be used up once."""
    # What a container of the job's own raises is not the observer's affair.
    with contextlib.suppress(Exception):
        if isinstance(results, Mapping):
            return list(results.values())
        if isinstance(results, (list, tuple)):
            return list(results)
        if dataclasses.is_dataclass(results):
            return [getattr(results, it.name) for it in dataclasses.fields(results)]
    return [results]


class Hook:
    """A hook of an observer. It stays outside of the compiled model, and a copy of the model has none."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # In its place a function that takes anything and does nothing, which is there without this package, too.
        return getattr, (contextlib.nullcontext(), "__exit__")


class Observer:
    """See `observe`."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        shape: Shape | None,
        ranks: tuple[int, int],
        layout: Callable[..., list[int]] | None,
    ) -> None:
        (rank, count), self._layout, self._names = ranks, layout, names_of(model)
        if not 0 <= rank < count:
            raise ValueError(f"observe: ranks is {ranks}; give the rank, from 0, and how many ranks there are")
        kinds, heads = layers_of(model) if shape is None else _layers_of_shape(shape)
        device = next((it.device.type for it in model.parameters()), "cpu")
        # Whether that was said already: that documents of a step are not known, that the file takes no more lines, and
        # that a step has too many forwards.
        self._is_odd = self._is_full = self._is_long = False
        folder.mkdir(parents=True, exist_ok=True)
        # A job that begins again goes on in the same file, under a head of its own.
        self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")
        self._write(
            {
                "cadre_observe": VERSION,
                "rank": rank,
                "ranks": count,
                "device": device,
                "layers": kinds,
                "heads": heads,
            }
        )
        self._step = 0
        self._on_host = device == "cpu"
        self._ended = time.perf_counter()
        # Those of the current step; the one that runs; and how many a checkpoint may compute again.
        self._forwards: list[Forward] = []
        self._has_too_many = False
        self._runs: Forward | None = None
        self._repeatable = 0
        self._held: tuple[dict[str, Any], list[Callable[[], list[int]]]] | None = None
        self._hooks = [
            model.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            model.register_forward_hook(Hook(self._after)),
            optimizers.register_optimizer_step_post_hook(self._stepped),
        ]
        atexit.register(self.close)

    def close(self) -> None:
        """Writes the last steps and removes the hooks."""
        for it in self._hooks:
            it.remove()
        self._hooks = []
        self._write_held()
        with contextlib.suppress(OSError):
            self._file.close()
        atexit.unregister(self.close)

    def _before(self, _model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._runs = None
        if self._has_too_many or not torch.is_grad_enabled():
            return
        if self._repeatable and torch._C._current_graph_task_id() != -1:
            # It was counted when it was computed for the first time.
            self._repeatable -= 1
            return
        self._runs = Forward(self._unless_odd(lambda: self._documents(arguments, named), lambda: None))

    def _after(self, _model: nn.Module, _arguments: tuple[Any, ...], results: Any) -> None:
        # One that ends with an exception does not come here.
        forward, self._runs = self._runs, None
        if forward is None:
            return
        if len(self._forwards) == FORWARDS:
            self._give_up_step()
            return
        forward.end(results)
        self._forwards.append(forward)
        if torch._C._current_graph_task_id() == -1 and is_repeated():
            self._repeatable += 1

    def _give_up_step(self) -> None:
        self._forwards, self._repeatable, self._has_too_many = [], 0, True
        if not self._is_long:
            self._is_long = True
            said = (
                f"step {self._step} is not logged, nor any other with more than {FORWARDS} forwards before an optimizer"
            )
            print(f"cadre: observe: {said} of torch makes a step", file=sys.stderr)

    def _stepped(self, *_: Any) -> None:
        if self._has_too_many:
            self._write_held()
            self._step, self._ended, self._has_too_many = self._step + 1, time.perf_counter(), False
            return
        # Further optimizers of the same step have had no forward.
        if not self._forwards:
            return
        now = time.perf_counter()
        self._write_held()
        # One whose backward did not end was tried again.
        these = [it for it in self._forwards if not it.waits] or self._forwards
        began = these[0].began
        told = {"step": self._step, "seconds": now - began, "seconds_before": began - self._ended}
        if self._on_host:
            # On a GPU the host is ahead of what it asked for.
            told["seconds_forward"] = sum(it.seconds for it in these)
        self._held = told, [it.documents for it in these]
        self._step, self._ended = self._step + 1, now
        self._forwards, self._repeatable = [], 0

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held:
            told, said = held
            documents = [self._unless_odd(it, None) for it in said]
            if None not in documents:
                self._write(told | {"documents": documents})

    def _unless_odd(self, call: Callable[[], Any], instead: Any) -> Any:
        """What `call` returns; `instead` where it raises, which is said once."""
        try:
            return call()
        except Exception as odd:
            if not self._is_odd:
                self._is_odd = True
                said = f"step {self._step} is not logged, nor any other whose documents are not known"
                print(f"cadre: observe: {said}: {type(odd).__name__}: {odd}", file=sys.stderr)
            return instead

    def _write(self, told: dict[str, Any]) -> None:
        if self._is_full:
            return
        try:
            self._file.write(json.dumps(told, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as why:
            self._is_full = True
            said = f"{self._file.name} takes no more lines, so no further step is logged"
            print(f"cadre: observe: {said}: {why}", file=sys.stderr)

    def _documents(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[[], list[int]]:
        if self._layout:
            lengths = [int(it) for it in self._layout(*arguments, **named)]
            return lambda: lengths
        return documents_of(arguments, named, self._names)


def names_of(model: nn.Module) -> list[str]:
    """What the model inside of its wrappers calls the arguments that it is given by position."""
    while (below := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
        model = below
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, it in inspect.signature(model.forward).parameters.items() if it.kind in by_position]


def documents_of(
    arguments: tuple[Any, ...], named: Mapping[str, Any], names: Sequence[str] = ()
) -> Callable[[], list[int]]:
    """A function that returns the lengths of a forward's documents. It may wait for a GPU."""
    first = arguments[0] if arguments else None
    given = {**(first if isinstance(first, Mapping) else {}), **dict(zip(names, arguments, strict=False)), **named}
    if isinstance(first, Tensor):
        given.setdefault(_TOKENS[0], first)
    # Megatron passes the lengths in a structure.
    packed = getattr(given.get("packed_seq_params"), "cu_seqlens_q", None)
    ends = next((given[it] for it in _ENDS if given.get(it) is not None), packed)
    if ends is not None:
        ends = _on_host(ends)
        return lambda: _lengths(ends())
    tokens = next((given[it] for it in _TOKENS if isinstance(given.get(it), Tensor)), None)
    positions = next((given[it] for it in _POSITIONS if isinstance(given.get(it), Tensor)), None)
    if positions is not None and positions.dim() in (1, 2):
        batch = tokens.shape[0] if tokens is not None and tokens.dim() > 1 else 1
        rows = _on_host(positions)
        return lambda: runs_of(rows().expand(batch, -1))
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        filled = _on_host(mask.sum(1))
        return lambda: [it for it in filled().tolist() if it]
    if tokens is not None and tokens.dim() > 1:
        lengths = [tokens.shape[1]] * tokens.shape[0]
        return lambda: lengths
    raise ValueError(
        f"observe: nothing in the model's call says its documents ({sorted(given)}); give `layout`, which gets the "
        "call's arguments and returns their lengths"
    )


def _lengths(ends: Tensor) -> list[int]:
    """Ends that repeat are of no rows: a document without any, or room that a batch did not need."""
    ends = ends.flatten().unique_consecutive()
    return [] if ends.tolist() == [0] else differences("observe: ends of documents", ends)


def runs_of(positions: Tensor) -> list[int]:
    """Lengths of documents from positions: a document begins where a position does not follow the one before."""
    ends = [torch.nonzero(it.diff() != 1).flatten().add(1).tolist() for it in positions]
    return [end - start for of in ends for start, end in zip([0, *of], [*of, positions.shape[1]], strict=True)]


def _on_host(tensor: Tensor) -> Callable[[], Tensor]:
    """A copy of a tensor on the host, without waiting for the GPU now."""
    if tensor.device.type != "cuda":
        # Copied, since the caller may overwrite the tensor.
        copy = tensor.detach().cpu().clone()
        return lambda: copy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor.detach(), non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait


def layers_of(model: nn.Module) -> tuple[list[str], list[int]]:
    """The kind of each layer of a model of transformers, `none` where it has no core attention; query heads, KV heads,
    head dim."""
    inner: Any = model
    while not hasattr(inner, "config") and (below := getattr(inner, "_orig_mod", getattr(inner, "module", None))):
        inner = below
    config = getattr(inner, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if config is None or not hasattr(config, "num_attention_heads"):
        raise TypeError(
            f"observe: {type(model).__name__} has no configuration of transformers; give `shape`, a cadre.Shape"
        )
    heads, count = config.num_attention_heads, config.num_hidden_layers
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = {
        "full_attention": "causal",
        "attention": "causal",
        "sliding_attention": f"window:{window}",
        "chunked_attention": f"causal in chunks of {getattr(config, 'attention_chunk_size', None)}",
    }
    default = "sliding_attention" if window is not None else "full_attention"
    each = getattr(config, "layer_types", None) or [default] * count
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [kinds.get(it, "none") for it in each], [heads, kv_heads, dim]


def _layers_of_shape(shape: Shape) -> tuple[list[str], list[int]]:
    every = (shape.query_heads, shape.kv_heads, shape.head_dim)

    def told(kind: object, own: tuple[int, int, int]) -> str:
        query, kv, dim = own
        return str(kind) if own == every else f"{kind} heads {query}/{kv} dim {dim}"

    return [told(kind, own) for kind, own in zip(shape.kinds, shape.heads, strict=True)], list(every)


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
