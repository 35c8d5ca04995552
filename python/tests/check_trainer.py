"""A job for `cadre check` that is right: a `Trainer` of transformers, gradients of two batches an update."""

import tempfile

import cadre.trainer
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Pooled(cadre.trainer.OnPool, Trainer):
    pass


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="cadre")
    rows = [{"input_ids": [(7 * at + it) % 64 for it in range(2 + 5 * at % 31)]} for at in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        sums = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "logging_steps": 1}
        arguments = TrainingArguments(folder, max_steps=4, ddp_backend="gloo", **quiet, **sums)
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        Pooled(LlamaForCausalLM(config), arguments, train_dataset=rows, data_collator=collator).train()
    raise AssertionError("what comes after the loop is no part of a check")


main()
