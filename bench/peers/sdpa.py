"""Times PyTorch's scaled_dot_product_attention, f32, causal, on CPU.

Reads a request a line from standard input, answers a line with a JSON object each, until the input ends.

    {"lengths": [1024], "query": 4, "kv": 2, "dim": 64, "threads": 2, "runs": 3}
    -> {"forward": [seconds, ...], "backward": [seconds, ...]}

Documents of one request are looped over, as a user without a packed kernel does. Inputs are made once
per shape. The first line it writes is {"torch": version}, or {"error": why not} and it ends.
"""

import json
import sys
import time


def tensors(torch, request, cache):
    """Q, K, V, dO of each document, kept from request to request."""
    key = json.dumps([request[name] for name in ("lengths", "query", "kv", "dim")])
    if key not in cache:
        cache.clear()
        generator = torch.Generator().manual_seed(1)

        def rows(heads, length, leaf):
            # Stored as rows of heads, the layout that linear layers give, seen as heads of rows.
            data = torch.randn(1, length, heads, request["dim"], generator=generator)
            return data.transpose(1, 2).requires_grad_(leaf)

        cache[key] = [
            (
                rows(request["query"], length, True),
                rows(request["kv"], length, True),
                rows(request["kv"], length, True),
                rows(request["query"], length, False),
            )
            for length in request["lengths"]
        ]
    return cache[key]


def answer(torch, request, cache):
    """Seconds of each run, forward and backward."""
    torch.set_num_threads(request["threads"])
    documents = tensors(torch, request, cache)
    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = request["query"] != request["kv"]
    seconds = {"forward": [], "backward": []}
    for _ in range(request["runs"]):
        start = time.perf_counter()
        outputs = [attention(q, k, v, is_causal=True, enable_gqa=grouped) for q, k, v, _ in documents]
        middle = time.perf_counter()
        for output, (q, k, v, gradient) in zip(outputs, documents, strict=True):
            torch.autograd.grad(output, (q, k, v), gradient)
        end = time.perf_counter()
        seconds["forward"].append(middle - start)
        seconds["backward"].append(end - middle)
    return seconds


def main():
    """Answers requests until the input ends."""
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"torch": torch.__version__}), flush=True)
    cache = {}
    for line in sys.stdin:
        print(json.dumps(answer(torch, json.loads(line), cache)), flush=True)


if __name__ == "__main__":
    main()
