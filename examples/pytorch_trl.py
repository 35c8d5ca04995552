"""Packed supervised fine-tuning with TRL's `SFTTrainer`; core attention of the model runs on the pool.

    command: [torchrun, examples/pytorch_trl.py]

In: pieces of the books in `examples/bible`, a token a byte. TRL packs them and says where each ends. Out: a line an
update. What is Cadre's here is marked.
"""

import argparse

import cadre.trainer
import torch
from datasets import Dataset
from pytorch_models import llama
from pytorch_trainer import documents
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


class Pooled(cadre.trainer.OnPool, SFTTrainer):  # Cadre: attention of this trainer's model is on the pool
    pass


def bytes_alone() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes: TRL wants one, though the documents are tokens already."""
    words = {f"<{it}>": it for it in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<10>", unk_token="<0>")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--longest", type=int, default=1024, help="rows of a document, and of a batch")
    parser.add_argument("--attention", default="cadre", help="transformers' own, `sdpa`, does without a pool")
    parser.add_argument("--out", default="/tmp/pytorch-trl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = SFTConfig(
        output_dir=options.out,
        packing=True,
        max_length=options.longest,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    kind = Pooled if options.attention == "cadre" else SFTTrainer
    trainer = kind(
        model=llama(options.attention),
        args=arguments,
        train_dataset=Dataset.from_list(documents(options.documents, options.longest)),
        processing_class=bytes_alone(),
    )
    trainer.train()


if __name__ == "__main__":
    main()
