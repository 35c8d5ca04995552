"""What the examples of PyTorch train on: the books in `examples/bible`, cut at lengths with a long tail, and packed.

In: a rank, a number of tokens. Out: batches of a rank without end, or documents for all ranks. Nothing here is Cadre's.
"""

import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

BOOKS = Path(__file__).resolve().parent / "bible"


def packed(rank: int, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Batches of one row: documents one behind the other, none of them predicts the first byte of the next."""
    books = [it.read_bytes() for it in sorted(BOOKS.glob("*.txt"))]
    draw = random.Random(rank)
    while True:
        lengths, texts = [], []
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, 1 + int(draw.lognormvariate(5.5, 1.2))))
            book = draw.choice(books)
            start = draw.randrange(len(book) - lengths[-1])
            texts.append(book[start : start + lengths[-1]])
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        input_ids = torch.tensor(list(b"".join(texts)))
        labels = input_ids.clone()
        labels[ends[:-1].long()] = -100
        yield {
            "input_ids": input_ids[None],
            "labels": labels[None],
            "position_ids": torch.cat([torch.arange(it) for it in lengths])[None],
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
        }


def documents(step: int, rows: int) -> list[Tensor]:
    """Pieces of the books for all ranks, of so many rows together; every rank draws the same."""
    books, draw, pieces = [it.read_bytes() for it in sorted(BOOKS.glob("*.txt"))], random.Random(step), []
    while (left := rows - sum(len(it) for it in pieces)) > 0:
        length, book = min(left, 1 + int(draw.lognormvariate(5.5, 1.2))), draw.choice(books)
        start = draw.randrange(len(book) - length)
        pieces.append(torch.tensor(list(book[start : start + length])))
    return pieces
