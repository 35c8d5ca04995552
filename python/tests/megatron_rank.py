"""The example of Megatron-core with Megatron's own recompute: `full` (all layers at once), `uniform` (layer by layer),
or `selective` (core attention alone).

    megatron_rank.py KIND ARGUMENTS...

In: the environment of a job, and the example's arguments. Megatron keeps the random state of a GPU beside a checkpoint;
where there is none, it keeps nothing.
"""

import functools
import sys
from pathlib import Path

from megatron.core.tensor_parallel import random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import pytorch_megatron

KINDS = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def nothing(*_: object, **__: object) -> None:
    return None


random._get_cuda_rng_state = random._set_cuda_rng_state = nothing
kind = sys.argv.pop(1)
pytorch_megatron.TransformerConfig = functools.partial(pytorch_megatron.TransformerConfig, **KINDS[kind])
pytorch_megatron.main()
