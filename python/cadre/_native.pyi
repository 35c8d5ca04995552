"""The native half: a rank's session, and core attention in this process (`python/src`)."""

from collections.abc import Sequence

from torch import Tensor

__version__: str

class RefusedError(ValueError):
    """What the caller can correct."""

class Ticket:
    """A submitted phase, to be waited for once."""

class Session:
    """A rank's side of a job. `docs/trainers.md` says which call comes when; one out of turn ends the job everywhere.

    `RefusedError`: what the caller can correct. `RuntimeError`: the job ended, or a call was out of turn.
    """

    rank: int
    ranks: int
    wire: str
    """Type of rows on the wire, `float32` or `bfloat16`: rows are rounded to it when they are submitted."""
    wire_is_open: bool
    """Whether the job leaves that type to its ranks."""
    gpu: int | None
    """Which GPU computes what a plan gives to this rank."""

    @staticmethod
    def join(
        *,
        kinds: Sequence[str],
        heads: Sequence[tuple[int, int, int]],
        steps: int,
        seed: int,
        threads: int,
        on_nonfinite: str = "end",
        rows: str | None = None,
        gpu: int | None = None,
    ) -> Session:
        """Joins the job that the environment names. `kinds`: one a layer, such as `causal`, `full`,
        `window:ROWS` or `window:128 in chunks of 512 scale 0.0625 softcap 50`; `heads`: query heads, KV heads, head
        dim, likewise; all the same on every rank. `on_nonfinite`: `report` or `end`.
        `rows`: their type, which `wire` is then where the job leaves it to its ranks. `gpu`: the number of the GPU that
        computes what the plan gives to this rank; None: the CPU does."""

    def announce(
        self,
        step: int,
        micro_batches: Sequence[tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int, int]]]],
        turns: Sequence[tuple[str, int | Sequence[int]]],
        frozen: int,
    ) -> None:
        """What this rank holds of a step, by micro-batch: `(document, its rows)`, and `(document, start, end)` in the
        order of its rows. `turns`: micro-batches that go forward (`F`) and backward (`B`, but for the first `frozen`
        layers), in their order. Several in one turn go through each layer together: each of them is submitted before
        the first one is waited for."""

    def begin(self, step: int) -> str:
        """Waits for the step: `step`, or `completed` or `stopped` where none follows."""

    def submit(
        self,
        phase: tuple[int, int],
        qkv: tuple[Tensor, Tensor, Tensor],
        gradients: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
        *,
        lent: tuple[int, int] | None = None,
    ) -> Ticket:
        """Starts a phase of `(micro-batch, layer)`: backward with `gradients` (O, LSE, dO, dLSE or None). `[rows,
        heads, dim]`, f32 or bf16, on the CPU, rows at any distance; LSE `[rows, query heads]` in f32. The rows are the
        caller's again when it returns.

        `lent`: the number of a GPU on which all of them lie, and the handle of the stream there on which they are
        made. The call waits for no GPU, and the rows are the caller's again in the order of that stream."""

    def wait(self, ticket: Ticket, *results: Tensor, lent: tuple[int, int] | None = None) -> str | None:
        """Waits for a phase, computing what is planned for this rank, and writes O and LSE, or dQ, dK and dV. What is
        not finite among them, with layer, task and server; with `on_nonfinite="end"` it ends the job. A ticket is for
        one wait; one whose results are refused for their form may be waited for again. With `lent`, as in `submit`,
        the results are there in the order of that stream."""

    def done(
        self,
        step: int,
        *,
        loss: float,
        gradient_norm: float,
        learning_rate: float,
        validation_loss: float | None,
        tokens: int,
        seconds: float,
    ) -> None:
        """The step is over here."""

    def warn(self, text: str) -> None:
        """Says something to whoever reads the job's log."""

    def busy(self, seconds: float) -> None:
        """This rank is at work elsewhere for so long, at most: it does not stand still."""

    def saved(self, steps: int, path: str | None = None) -> None:
        """A checkpoint is written that holds so many steps of all attempts together."""

    def leave(self, how: str, *, for_good: bool = False) -> None:
        """Leaves the job, once: `completed`, `stopped`, or why the job fails, everywhere; `for_good` if another attempt
        would fail in the same way. The process then exits with the code that says so, if Python's were 0 or 1."""

def exit_with(code: int) -> None:
    """Makes this process exit with `code` where Python would exit with 0 or 1."""

def close_sockets() -> None:
    """Closes the sockets of the session, in a forked child: others learn of a rank's end by them."""

def leave_code_in(file: str) -> None:
    """Makes this process leave the code that it exits with in `file`."""

def give_sigterm_back() -> None:
    """SIGTERM does again what it did before this process joined a job, unless the script has installed a handler
    since."""

def gpu_refuses(number: int) -> str | None:
    """Why the kernels of GPUs do not run on this one."""

def gpu_forward(
    batch: tuple[str, tuple[int, int], Sequence[int]],
    qkv: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> None:
    """O in bf16 and LSE in f32 of whole documents, in the order of a stream; batch: kind, GPU and stream, lengths."""

def gpu_backward(
    batch: tuple[str, tuple[int, int], Sequence[int]],
    qkv: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """dQ, dK and dV in f32, from dO in bf16, LSE and rowsum(dO * O) - dLSE."""

def are_usual(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all three are plain tensors or parameters on the CPU, `[rows, heads, dim]` in f32 or in bf16, K and V of one
    shape, and Q as wide. False says nothing."""

def local_forward(
    batch: tuple[str, int, Sequence[int]],
    qkv: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
) -> None:
    """O and LSE in f32 of whole documents; batch: kind, threads, lengths."""

def local_backward(
    batch: tuple[str, int, Sequence[int]],
    qkv: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """dQ, dK and dV in f32, from O, LSE and dO in f32, dO in the type of Q, and dLSE, None for zeros."""
