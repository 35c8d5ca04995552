"""A small GPT of Megatron-core, with random weights, learns the King James Bible; its core attention runs on the pool.

    command: [python, examples/pytorch_megatron.py]

Data parallel: each rank holds whole models and its own documents. In: the books in `examples/bible`. Out: a line an
update, of two micro-batches each. Megatron's schedules ask for a GPU; on one, `get_forward_backward_func()` takes the
`feed` below as its data iterator. What is Cadre's here is marked.
"""

import argparse
import os

import cadre
import cadre.megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from pytorch_hybrid import documents

ACCUMULATE = 2


def configuration() -> TransformerConfig:
    return TransformerConfig(
        num_layers=3,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )


def layer(core_attention: type | None = None) -> ModuleSpec:
    """Of a layer; Cadre's attention takes the place of Megatron's."""
    spec = cadre.megatron.put_into(get_gpt_layer_local_spec(normalization="RMSNorm"))
    if core_attention:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    return spec


def gpt(spec: ModuleSpec, tokens: int) -> GPTModel:
    """On bytes; every process makes the same weights."""
    torch.manual_seed(1)
    # Megatron's rotations ask for a GPU.
    more = {"position_embedding_type": "learned_absolute"}
    return GPTModel(configuration(), spec, vocab_size=256, max_sequence_length=tokens, **more)


def loss_of(model: GPTModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over a micro-batch of whole documents, a row each."""
    ids = batch["input_ids"]
    rows, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(rows.shape[1])[None].expand(rows.shape[0], -1)
    return model(rows, positions, None, labels=labels).mean()


def lengths(batch: dict[str, torch.Tensor]) -> list[int]:
    """Of the documents, without their last bytes, which are targets alone."""
    count, length = batch["input_ids"].shape
    return [length - 1] * count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank and micro-batch")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # Cadre: joins the job, with the heads and layers of the configuration.
    cadre.init(cadre.megatron.shape(configuration()), steps=options.steps)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model = gpt(layer(), options.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = torch.zeros(())
    # Cadre: an update is a step of the pool; the documents of the next one are announced meanwhile.
    feed = cadre.batches(documents(rank, options.tokens), lengths, accumulate=ACCUMULATE)
    for batch in feed:
        loss = loss_of(model, batch) / feed.micro_batches
        loss.backward()
        total += loss.detach()
        if feed.is_last:
            for it in model.parameters():
                dist.all_reduce(it.grad)
                it.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            cadre.report(loss=total / ranks)  # Cadre: for the steps' log and the live view
            print(f"loss {total.item() / ranks:.6f}", flush=True)
            total.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
