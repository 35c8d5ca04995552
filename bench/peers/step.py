"""One training step of the reference model in PyTorch, eager, CPU: the peer of trainer/benches/step.rs.

Reads one JSON object a line from stdin and answers with one a line on stdout:
  {"parameters": FILE, "config": {...}, "threads": N}       loads the model
  {"step": FILE, "documents": [rows, ...], "rate": lr}       does a step, answers loss and seconds
The parameters are the flat f32 buffer of the model. A step file has the ids (u8), then the targets (i16, -1 for none).
"""

import json
import math
import sys
import time

import torch
import torch.nn.functional as F


def peak_mib():
    with open("/proc/self/status") as status:
        line = next(it for it in status if it.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Model:
    def __init__(self, path, config):
        self.c = config
        with open(path, "rb") as file:
            flat = torch.frombuffer(bytearray(file.read()), dtype=torch.float32)
        self.at, self.flat, self.tensors = 0, flat, []
        c = config
        width, dim, feed = c["width"], c["head_dim"], c["feed_forward"]
        query, kv = c["query_heads"] * dim, c["kv_heads"] * dim
        self.embedding = self.take(256, width)
        self.layers = [
            {
                "attention_norm": self.take(width),
                "qkv": self.take(query + 2 * kv, width),
                "o": self.take(width, query),
                "feed_norm": self.take(width),
                "gate_up": self.take(2 * feed, width),
                "down": self.take(width, feed),
            }
            for _ in range(c["layers"])
        ]
        self.norm, self.head = self.take(width), self.take(256, width)
        assert self.at == flat.numel()
        del self.flat
        gains = [it for it in self.tensors if it.dim() == 1]
        matrices = [it for it in self.tensors if it.dim() == 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def take(self, *shape):
        count = math.prod(shape)
        tensor = self.flat[self.at : self.at + count].view(*shape).clone().requires_grad_()
        self.at += count
        self.tensors.append(tensor)
        return tensor

    def attention(self, q, k, v, documents):
        # [tokens, heads, dim] to [1, heads, rows, dim] per document: the fastest that SDPA offers on CPU.
        out, at = [], 0
        for rows in documents:
            one = [it[at : at + rows].transpose(0, 1)[None] for it in (q, k, v)]
            out.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0])
            at += rows
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)

    def loss(self, ids, targets, documents):
        c = self.c
        dim, width = c["head_dim"], c["width"]
        query, kv = c["query_heads"] * dim, c["kv_heads"] * dim
        positions = torch.cat([torch.arange(rows) for rows in documents]).double()
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = torch.outer(positions, 10000.0**-exponents)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]

        def turn(x):
            low, high = x.chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

        x = self.embedding[ids]
        for layer in self.layers:
            h = F.rms_norm(x, (width,), layer["attention_norm"], 1e-5)
            q, k, v = (h @ layer["qkv"].T).split([query, kv, kv], dim=-1)
            q, k, v = (it.reshape(len(ids), -1, dim) for it in (q, k, v))
            x = x + self.attention(turn(q), turn(k), v, documents) @ layer["o"].T
            h = F.rms_norm(x, (width,), layer["feed_norm"], 1e-5)
            gate, up = (h @ layer["gate_up"].T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ layer["down"].T
        logits = F.rms_norm(x, (width,), self.norm, 1e-5) @ self.head.T
        return F.cross_entropy(logits, targets, ignore_index=-1)

    def step(self, ids, targets, documents, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(ids, targets, documents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tensors, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.item()


def main():
    model = None
    for line in sys.stdin:
        order = json.loads(line)
        if "parameters" in order:
            torch.set_num_threads(order["threads"])
            model = Model(order["parameters"], order["config"])
            answer = {"name": f"PyTorch {torch.__version__} eager, {order['threads']} threads"}
        else:
            with open(order["step"], "rb") as file:
                data = bytearray(file.read())
            count = len(data) // 3
            ids = torch.frombuffer(data[:count], dtype=torch.uint8).long()
            targets = torch.frombuffer(data[count:], dtype=torch.int16).long()
            begin = time.perf_counter()
            loss = model.step(ids, targets, order["documents"], order["rate"])
            answer = {"loss": loss, "seconds": time.perf_counter() - begin, "peak_mib": peak_mib()}
        print(json.dumps(answer), flush=True)


main()
