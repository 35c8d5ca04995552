"""A rank of the tests' job: three layers of three kinds without weights, of which one has other heads, whole documents
and one that goes on in the next rank, a step of two micro-batches.

In: the environment of a job; `--dtype` and `--bound` for other tensors and a coarser wire; `--recompute` for forwards
that are called again in the backward, layer by layer or all three at once; all steps are made once for each of these
(a round); `--frozen` for first layers without gradients; `--break` makes rank 1 fail in step 1: by an
exception (`exit`), by one on whose way `finish` is called (`finish`), or by `finish` alone (`early`).
Out: every result of this rank as `rank-N.pt` in the run's folder, by round, step, micro-batch and name. An exception,
if a result differs from that of `cadre.local()` bit for bit, or from that of torch's own attention in f64 by more than
the bound.
"""

import argparse
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cadre
import torch
from refusals import mistaken, refused
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

HEADS, KV_HEADS, DIM = 4, 2, 16
# Of the layer in the middle; as wide as the others.
OTHER_HEADS, OTHER_DIM = (2, 1), 32
CHUNK, SCALE, SOFTCAP = 100, 0.4, 3.0
KINDS = ("causal", cadre.Kind("window:64", CHUNK, SCALE, SOFTCAP, OTHER_HEADS, OTHER_DIM), "full")
# By step, micro-batch and rank. The document of step 1 that both ranks hold is longer than one of them.
LAYOUTS = [
    [[[300, 1, 129], [70, 260]]],
    [[[cadre.Stretch(0, 500, 0, 330)], [cadre.Stretch(0, 500, 330, 500), cadre.Stretch(1, 97, 0, 97)]]],
    [[[64, 200], [257]], [[33], [80, 150, 7]]],
]
# Step and micro-batch.
At = tuple[int, int]
NAMES = ("q", "k", "v")


def whole(at: At, ranks: int) -> dict[int, int]:
    """Rows of every document of a micro-batch, by its number, as cadre numbers those that lie whole on a rank."""
    documents = {}
    for rank, layout in enumerate(LAYOUTS[at[0]][at[1]]):
        for place, it in enumerate(layout):
            stretch = isinstance(it, cadre.Stretch)
            documents[it.document if stretch else rank + place * ranks] = it.rows if stretch else it
    return documents


def rows_of(at: At, rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """What a rank holds: document, start, end."""
    return [
        (it.document, it.start, it.end) if isinstance(it, cadre.Stretch) else (rank + place * ranks, 0, it)
        for place, it in enumerate(LAYOUTS[at[0]][at[1]][rank])
    ]


def numbers(at: At, layer: int, what: int, document: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a whole document, the same in every process."""
    step, micro_batch = at
    seed = torch.Generator().manual_seed((((step * 10 + micro_batch) * 10 + layer) * 10 + what) * 100 + document)
    heads, dim = (OTHER_HEADS, OTHER_DIM) if layer == 1 else ((HEADS, KV_HEADS), DIM)
    return torch.randn(rows, heads[what in (1, 2)], dim, generator=seed).to(dtype)


def stack(leaves: list[list[torch.Tensor]], attention) -> list[torch.Tensor]:
    """The layers, each with queries that depend on the results of the one before. O and LSE of each."""
    o, results = torch.zeros_like(leaves[0][0]), []
    for layer, (q, k, v) in enumerate(leaves):
        o, lse = attention(layer, q + 0.25 * o.reshape(q.shape), k, v)
        results += [o, lse]
    return results


def loss_of(results: list[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """Depends on O of the last layer, and on LSE of each."""
    return (results[-2] * gradient).sum() + sum(0.1 * it.sum() for it in results[1::2])


def ours(layer: int, q, k, v, cu_seqlens: torch.Tensor, named: bool = False):
    arguments = (q, k, v, cu_seqlens, cu_seqlens, 500, 500)
    more = {"causal": layer != 2, "layer": torch.tensor(layer) if named else None}
    if layer == 1:
        more |= {"window_size": (63, 0), "chunk": CHUNK, "softmax_scale": SCALE, "softcap": SOFTCAP}
    o, lse, _ = cadre.flash_attn_varlen_func(*arguments, **more, return_attn_probs=True)
    return o, lse.transpose(0, 1)


def in_f64(layer: int, q, k, v):
    """Plain attention on one whole document, and LSE of the same scores."""
    rows = torch.arange(q.shape[0])
    after = rows[None] - rows[:, None]
    near = (after <= 0) & (after > -64) & (rows[None] // CHUNK == rows[:, None] // CHUNK)
    mask = (after <= 0, near, after < 500)[layer]
    q, k, v = (it.transpose(0, 1) for it in (q, k, v))
    k, v = (it.repeat_interleave(q.shape[0] // it.shape[0], 0) for it in (k, v))
    scores = q @ k.transpose(1, 2) * (SCALE if layer == 1 else DIM**-0.5)
    if layer == 1:
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def expected(at: At, rank: int, ranks: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All results of a rank, in f64, from whole documents."""
    results = {}
    for document, rows in whole(at, ranks).items():
        told = [
            [numbers(at, layer, it, document, rows, dtype).double() for it in range(3)] for layer in range(len(KINDS))
        ]
        leaves = [[it.requires_grad_() for it in layer] for layer in told]
        found = stack(leaves, in_f64)
        loss_of(found, numbers(at, 9, 9, document, rows, dtype).double()).backward()
        results[document] = named(leaves, found)
    held = rows_of(at, rank, ranks)
    names = results[held[0][0]]
    return {name: torch.cat([results[it][name][start:end] for it, start, end in held]) for name in names}


def named(leaves: list[list[torch.Tensor]], found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    results = {f"{'lse' if at % 2 else 'o'}{at // 2}": it.detach() for at, it in enumerate(found)}
    return results | {
        f"d{name}{at}": it.grad
        for at, layer in enumerate(leaves)
        for name, it in zip(NAMES, layer, strict=True)
        if it.grad is not None
    }


def saves_attention(_, operator, *__, **___) -> CheckpointPolicy:
    """All but attention is computed again."""
    is_ours = operator == torch.ops.cadre.attention.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


def micro_batch_of(
    at: At, rank: int, ranks: int, options: argparse.Namespace, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All results of a rank, from the pool; compared with those of this process where documents lie whole on it."""
    bound = options.bound
    held = rows_of(at, rank, ranks)
    cu_seqlens = torch.tensor([0] + [end - start for _, start, end in held]).cumsum(0).int()

    def own(layer: int, what: int) -> torch.Tensor:
        documents = [numbers(at, layer, what, it, whole(at, ranks)[it], dtype)[start:end] for it, start, end in held]
        return torch.cat(documents)

    def leaves() -> list[list[torch.Tensor]]:
        trained = [layer >= options.frozen for layer in range(len(KINDS))]
        return [[own(layer, it).requires_grad_(trained[layer]) for it in range(3)] for layer in range(len(KINDS))]

    q, k, v = leaves()[0]
    if options.rows:
        wide = [it.detach().float() for it in (q, k, v)]
        mistaken("q is torch.float32 and would lose bits as torch.bfloat16", lambda: ours(0, *wide, cu_seqlens))
    mistaken("cu_seqlens say [2]", lambda: ours(0, q, k, v, torch.tensor([0, 2])))
    mistaken("layer 0 is causal and the call is full", lambda: ours(2, q, k, v, cu_seqlens))
    mistaken("layer 2 is called, and it is the turn of layer 0", lambda: ours(2, q, k, v, cu_seqlens, named=True))
    mistaken("q is (1, 4, 16), announced was", lambda: ours(0, q[:1], k, v, cu_seqlens))
    mistaken(
        "layer 0 is causal and the call is causal scale 2",
        lambda: cadre.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 500, 500, softmax_scale=2.0, causal=True),
    )

    def attention(layer: int, q, k, v):
        return ours(layer, q, k, v, cu_seqlens, named=options.recompute == "all")

    def by_two_threads(layer: int, q, k, v):
        """One of them is refused, whichever comes second, and the step goes on."""
        found, said = [], []

        def call() -> None:
            try:
                found.append(attention(layer, q, k, v))
            except RuntimeError as error:
                said.append(str(error))

        threads = [threading.Thread(target=call) for _ in range(2)]
        for it in threads:
            it.start()
        for it in threads:
            it.join()
        assert len(found) == 1 and "all 3 forward phases were called" in said[0], said
        return found[0]

    def forward(layer: int, q, k, v):
        last = layer == len(KINDS) - 1
        o, lse = (by_two_threads if last else attention)(layer, q, k, v)
        if options.frozen <= layer < len(KINDS) - 1:
            mistaken(f"after {layer + 1} of 3 forward", lambda: torch.autograd.grad(o.sum(), v, retain_graph=True))
        return o, lse

    def again(layer: int, q, k, v):
        more = {}
        if options.recompute == "selective":
            more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, saves_attention)
        return checkpoint(attention, layer, q, k, v, use_reentrant=options.recompute == "reentrant", **more)

    one = leaves()
    if options.recompute is None:
        found = stack(one, forward)
    elif options.recompute == "all":
        found = checkpoint(stack, one, attention, use_reentrant=False)
    else:
        found = stack(one, again)
    # What no recompute asks for is not kept.
    kept = cadre._job.running().kept
    assert len(kept) == (len(KINDS) if options.recompute else 0), f"{len(kept)} layers are kept"
    if options.recompute is None and not options.frozen:
        mistaken("it is the turn of layer 2", lambda: torch.autograd.grad(found[1].sum(), one[0][0], retain_graph=True))
    gradients = len(KINDS) - options.frozen
    for call in (lambda: cadre.begin_step([1]), cadre.next_micro_batch) if gradients else ():
        last = at[1] + 1 == len(LAYOUTS[at[0]]) and call is cadre.next_micro_batch
        mistaken("the last micro-batch" if last else f"3 of 3 forward phases and 0 of {gradients} backward", call)
    with cadre.local():
        # Gradients beside those of the step; the call says its documents.
        beside = ours(0, *(it.detach().requires_grad_() for it in (q, k, v)), torch.tensor([0, 1, len(q)]))[0].sum()
    beside.backward()
    loss = loss_of(found, own(9, 9))
    # As many rows as an evaluation may have whose forward comes before: then it is the training's that is refused.
    words = "all 3 forward phases were called; begin the next micro-batch or step, or evaluate under cadre.local()"
    mistaken(words, lambda: attention(0, q, k, v))
    # Nobody promises that backward runs in the thread of the forward.
    if loss.requires_grad:
        thread = threading.Thread(target=lambda: loss.backward(retain_graph=True))
        thread.start()
        thread.join()
    results = {name: it.clone() for name, it in named(one, found).items()}
    second = "layer 2, for a second time" if options.recompute is None else "recomputed, and its backward is over"
    if options.recompute == "selective":
        # Torch's words.
        second = "backward an extra time"
    if loss.requires_grad:
        (refused if options.recompute == "selective" else mistaken)(second, loss.backward)
    # Once: a child copies what it changes, which takes longer than all of the step.
    if cadre._job.running().number == 1:
        if (child := os.fork()) == 0:
            # Ends as a script does, with what Python does then.
            mistaken("this process was forked from rank", lambda: cadre.report(loss=0.0))
            mistaken("this process was forked from rank", lambda: attention(0, q, k, v))
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0, "a forked process broke"
        is_there, there = os.pipe()
        if (child := os.fork()) == 0:
            os.write(there, b" ")
            time.sleep(60)
            os._exit(0)
        os.read(is_there, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM, "a forked process does not hear SIGTERM"
    if any(isinstance(it, cadre.Stretch) for it in LAYOUTS[at[0]][at[1]][rank]):
        lengths = [end - start for _, start, end in held]
        ends = cadre.pack([torch.zeros(sum(lengths) + 9).int()], rows=[len(q), 9], rank=0, ranks=2).cu_seqlens
        with cadre.local(whole=True):
            # Other documents may be as long as those of the step.
            ours(0, q, k, v, cu_seqlens)
        with cadre.local():
            for it in (cu_seqlens, ends):
                mistaken("goes on in another rank", lambda it=it: ours(0, q, k, v, it))
    if all(start == 0 and end == whole(at, ranks)[it] for it, start, end in held):
        with cadre.local():
            other = leaves()
            found = stack(other, attention)
            if loss.requires_grad:
                loss_of(found, own(9, 9)).backward()
        for name, it in named(other, found).items():
            # A plan may cut a document, and sums dK and dV in another order then.
            if name.startswith(("dk", "dv")):
                same = (it - results[name]).abs().max() <= bound * it.abs().max()
            else:
                same = torch.equal(it, results[name])
            assert same, f"step, micro-batch {at}, rank {rank}: {name} of the pool is not that of this process"
    cadre.busy(60)
    cadre.report(loss=loss.item(), validation_loss=at[0] + 0.5 if at[0] else None)
    return results


def bad_input(call: Callable, q: torch.Tensor) -> None:
    """What no call of attention takes, wherever it is computed; `call` has K, V and ends of 5 rows."""
    k, ends = q[:, :2], torch.tensor([0, 5])
    for words, more in (
        ("q is a list; give a tensor", {"q": [1.0]}),
        ("k is (5, 16); give [rows, heads, dim]", {"k": k[:, 0]}),
        ("v is on meta; rows lie on the CPU or on a GPU", {"v": k.to("meta")}),
        ("k is torch.float64; attention takes", {"k": k.double()}),
        ("v is torch.bfloat16 and q torch.float32; cast them", {"v": k.bfloat16()}),
        ("heads of v are 8 wide and those of q 16", {"v": k[..., :8]}),
        ("K is [5, 2, 16], not [4, 2, 16]; give it Q's rows", {"q": q[:4]}),
        ("cu_seqlens_q is a list; give a tensor", {"cu_seqlens_q": [0, 5]}),
        ("cu_seqlens_q is on meta; give it on the CPU", {"cu_seqlens_q": ends.to("meta")}),
        ("cu_seqlens_q is [1, 5]; it begins with 0", {"cu_seqlens_q": torch.tensor([1, 5])}),
        ("cu_seqlens_q and cu_seqlens_k differ", {"cu_seqlens_k": torch.tensor([0, 2, 5])}),
        ("outside of a step documents have no known ends", {"cu_seqlens_q": None, "cu_seqlens_k": None}),
        ("window_size (-2, 0): a side has 0 rows or more", {"window_size": (-2, 0)}),
        ("dropout_p is 0.1: it is not there yet; leave it out", {"dropout_p": 0.1}),
        ("softmax_scale is -1.0; give a number from", {"softmax_scale": -1.0}),
        ("softcap is -1.0; give a number from", {"softcap": -1.0}),
        ("head dim of q is 12; heads have a multiple of 8", {"q": q[..., :12], "k": k[..., :12], "v": k[..., :12]}),
        ("sinks and s_aux are given", {"sinks": q[0, :, 0], "s_aux": q[0, :, 0]}),
        ("sinks are (5,) and q has 4 heads", {"sinks": q[:, 0, 0]}),
        ("layer is 0; give its number in a tensor", {"layer": 0}),
    ):
        mistaken(words, lambda more=more: call(**{"q": q} | more))
    mistaken("query has 4 heads and key 2; pass enable_gqa=True", lambda: cadre.varlen_attn(q, k, k, ends, ends, 5, 5))
    mistaken("Shape: layer 0: head_dim is 12", lambda: cadre.Shape(2, 2, 12, ("causal",)))
    mistaken("Kind: scale is 0", lambda: cadre.Kind(scale=0))
    mistaken("give [batch, rows, heads, dim]", lambda: cadre.flash_attn_func(q, k, k))
    mistaken("k is torch.float64", lambda: cadre.submit(q, k.double(), k))
    mistaken("list is not what cadre.submit returned", lambda: cadre.wait([]))
    operator, rest = torch.ops.cadre.attention, ("causal", None)
    mistaken("cu_seqlens_q is [2, 5]", lambda: operator(q, k, k, torch.tensor([2, 5]), None, *rest))
    with cadre.local():
        x = q.clone().requires_grad_()
        o = call(x)
        (dq,) = torch.autograd.grad(o.sum(), x, retain_graph=True, create_graph=True)
        mistaken("a second derivative of attention is not there", dq.sum().backward)
        several = (o, x, torch.ones(2, *o.shape))
        mistaken("is_grads_batched", lambda: torch.autograd.grad(*several, is_grads_batched=True))


def threads() -> set[str]:
    """Names of this process's threads."""
    return {it.read_text().strip() for it in Path("/proc/self/task").glob("*/comm")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32", help="of each round")
    parser.add_argument("--bound", type=float, default=1e-5)
    parser.add_argument("--recompute", default="none", help="of each round: none, layer, reentrant, selective, all")
    parser.add_argument("--frozen", type=int, default=0)
    parser.add_argument("--rows", help="what each rank says of their type, where the job says nothing")
    parser.add_argument("--exchange", choices=("auto", "tcp"), help="what the job says of it")
    parser.add_argument("--break", dest="broken", choices=("exit", "finish", "early"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rounds = list(itertools.product(options.dtype.split(","), options.recompute.split(",")))
    held = [[it[rank] for it in step] for step in LAYOUTS]
    steps = len(rounds) * len(held)
    said = getattr(torch, options.rows.split(",")[rank]) if options.rows else None
    cadre.init(cadre.Shape(HEADS, KV_HEADS, DIM, KINDS, options.frozen), steps=steps, dtype=said)
    if said:
        assert cadre._job.current().wire == said, cadre._job.current().wire
    if options.exchange:
        # A thread has its name when it runs, which may be a moment later.
        until = time.monotonic() + 30
        while "arenas" not in (names := threads()) and options.exchange == "auto" and time.monotonic() < until:
            time.sleep(0.05)
        assert ("arenas" in names) == (options.exchange == "auto"), f"rank {rank} has the threads {names}"
    q = torch.randn(5, HEADS, DIM)
    ends = torch.tensor([0, 5])
    call = functools.partial(cadre.flash_attn_varlen_func, k=q[:, :2], v=q[:, :2], cu_seqlens_q=ends, cu_seqlens_k=ends)
    call = functools.partial(call, max_seqlen_q=5, max_seqlen_k=5)
    bad_input(call, q)
    # A training that forgets to begin a step.
    mistaken("no step has begun, and q has a gradient", lambda: call(q.clone().requires_grad_()))
    # An evaluation before it.
    call(q)
    with cadre.local():
        call(q.clone().requires_grad_()).sum().backward()
    results = {}
    for step in range(steps):
        around, place = divmod(step, len(held))
        layouts, following = held[place], held[(place + 1) % len(held)] if step + 1 < steps else None
        dtype, recompute = getattr(torch, rounds[around][0]), rounds[around][1]
        options.recompute = None if recompute == "none" else recompute
        # Each way to begin: announced ahead, and not; a list of layouts, or one.
        assert cadre.begin_step(layouts if place else layouts[0], next=following if place == 1 else None)
        if options.broken == "early" and step == rank == 1:
            cadre.finish()
        if options.broken and step == rank == 1:
            try:
                raise ValueError("the loader broke")
            finally:
                if options.broken == "finish":
                    cadre.finish()
        for micro_batch in range(len(layouts)):
            if micro_batch:
                mistaken(f"{micro_batch} of {len(layouts)} micro-batches were run", lambda: cadre.begin_step([1]))
                cadre.next_micro_batch()
            at = (place, micro_batch)
            found = micro_batch_of(at, rank, ranks, options, dtype)
            for name, it in expected(at, rank, ranks, dtype).items():
                if name not in found:
                    assert name[0] == "d" and int(name[-1]) < options.frozen, f"{name} is not there"
                    continue
                error = (found[name].double() - it).abs().max() / it.abs().max()
                assert error <= options.bound, f"step, micro-batch {at}, rank {rank}: {name} is {error:.1e} off"
                results[f"{around}.{place}.{micro_batch}.{name}"] = found[name]
    cadre.finish()
    torch.save(results, Path(os.environ["CADRE_OUT"]) / f"rank-{rank}.pt")


main()
