"""Small models of transformers on bytes, with random weights, the same in every process.

In: the name of an attention, of which Cadre's is "cadre". Out: a model. Nothing here is Cadre's but that name.
"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "use_cache": False,
}


def llama(attention: str) -> LlamaForCausalLM:
    """Four layers."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention))


def qwen(attention: str) -> Qwen2ForCausalLM:
    """The last two layers see 64 rows."""
    torch.manual_seed(1)
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **window, attn_implementation=attention))


def gpt_oss(attention: str) -> GptOssForCausalLM:
    """Heads have sinks, each other layer sees 64 rows, and tokens go to two of four experts."""
    torch.manual_seed(1)
    more = {"head_dim": 32, "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **more, attn_implementation=attention))
    for it in model.model.layers:
        torch.nn.init.normal_(it.self_attn.sinks)
    return model


MODELS = {"llama": llama, "qwen": qwen, "gpt-oss": gpt_oss}
