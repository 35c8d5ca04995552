"""Core attention of PyTorch models on a pool of attention servers.

One line swaps the attention of a model, two lines tell the pool what comes:

    cadre.init(model, steps=100)
    for batch in cadre.batches(loader):
        ...  # forward, backward and optimizer as ever

Inside a step each call of attention is the next phase of the step that was announced, forward layer by layer, then
backward in reverse. Outside of a step, under `local()`, and in a process that no job has started, it is computed
here, by the kernels that the servers run, with the same bits of O, LSE and dQ.
"""

from ._attention import flash_attn_varlen_func
from ._batches import Batches, batches
from ._flight import submit, wait
from ._job import begin_step, finish, init, next_micro_batch
from ._kind import Kind
from ._layout import Shape, Stretch
from ._local import local
from ._native import Session, Ticket, __version__
from ._observe import Observer, observe
from ._pack import Packed, pack
from ._swaps import flash_attn_func, install, varlen_attn
from ._telling import busy, report, saved, stopped

__all__ = [
    "Batches",
    "Kind",
    "Observer",
    "Packed",
    "Session",
    "Shape",
    "Stretch",
    "Ticket",
    "__version__",
    "batches",
    "begin_step",
    "busy",
    "finish",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "init",
    "install",
    "local",
    "next_micro_batch",
    "observe",
    "pack",
    "report",
    "saved",
    "stopped",
    "submit",
    "varlen_attn",
    "wait",
]
