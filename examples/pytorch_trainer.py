"""The Llama of pytorch_llama.py, trained by `Trainer` of transformers: gradients of two batches are summed for an
update, layers are computed again in the backward, documents are packed by transformers' own collator.

    command: [python, examples/pytorch_trainer.py]

In: books in `examples/bible`. Out: a line of `Trainer` an update. What is Cadre's here is marked.
"""

import argparse
import random

import cadre.trainer
import torch
from pytorch_books import BOOKS
from pytorch_models import llama
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments


class Pooled(cadre.trainer.OnPool, Trainer):  # Cadre: attention of this Trainer's model is on the pool
    pass


def documents(count: int, longest: int) -> list[dict[str, list[int]]]:
    """Pieces of the books, their lengths with a long tail."""
    books, draw = [it.read_bytes() for it in sorted(BOOKS.glob("*.txt"))], random.Random(1)
    pieces = []
    for _ in range(count):
        rows = min(longest, 2 + int(draw.lognormvariate(4.5, 1.0)))
        book = draw.choice(books)
        start = draw.randrange(len(book) - rows)
        pieces.append({"input_ids": list(book[start : start + rows])})
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--longest", type=int, default=1024, help="rows of a document")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--attention", default="cadre", help="transformers' own, `sdpa`, does without a pool")
    parser.add_argument("--out", default="/tmp/pytorch-trainer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=options.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        num_train_epochs=options.epochs,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="epoch",
        report_to="none",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    kind = Pooled if options.attention == "cadre" else Trainer
    trainer = kind(
        model=llama(options.attention),
        args=arguments,
        train_dataset=documents(options.documents, options.longest),
        # Says where documents end: Cadre takes it from the batch.
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )
    trainer.train()


if __name__ == "__main__":
    main()
