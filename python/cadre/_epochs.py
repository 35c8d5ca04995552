"""Where epochs begin, compared over ranks: loaders of other lengths would mix epochs, and nobody would see it.

In: the step that begins, and whether it is the first of an epoch. Out: a refusal that names both ranks, one step after
the shorter loader ended at the latest. Ranks tell each other through the store of torch.distributed; where the script
has not initialized it, nothing is compared.
"""

import torch.distributed as dist


class Epochs:
    """See the module."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.begun = 0

    def step(self, number: int, *, is_first: bool) -> None:
        """Counts a step, and compares epochs of the ranks at its begin."""
        self.begun += is_first
        if self.ranks == 1 or self.begun == 0 or not (dist.is_available() and dist.is_initialized()):
            return
        store = dist.distributed_c10d._get_default_store()
        if is_first:
            # The first rank to arrive publishes its number.
            told = store.compare_set(self.key(self.begun), "", f"{self.rank} {number}").decode()
        elif store.check([self.key(self.begun + 1)]):
            told = store.get(self.key(self.begun + 1)).decode()
        else:
            return
        other, step = (int(it) for it in told.split())
        if step == number if is_first else step > number:
            return
        own = f"with step {number}" if is_first else f"after step {number}, or later"
        epoch = self.begun - 1 if is_first else self.begun
        raise ValueError(
            f"batches: epoch {epoch} begins with step {step} on rank {other}, and {own} on rank {self.rank}: "
            "loaders differ in length; give all ranks as many batches an epoch"
        )

    @staticmethod
    def key(epoch: int) -> str:
        return f"cadre/epoch/{epoch}"
