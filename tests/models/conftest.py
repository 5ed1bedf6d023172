"""Tiny random models of every family, made and saved by transformers, loaded by us."""
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jaxrl_llm.models import Transformer, weights

torch.set_num_threads(2)
_SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, attn_implementation="eager",
              bos_token_id=None, eos_token_id=None, pad_token_id=None)
_LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)
_GEMMA_ROPE = {"full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1000.0),
               "sliding_attention": dict(rope_type="default", rope_theta=100.0)}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama_untied": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "llama_llama3_rope": lambda: transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    "llama_linear_rope": lambda: transformers.LlamaConfig(
        **_SHAPE, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=100.0)),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen2_sliding": lambda: transformers.Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPE, head_dim=16, query_pre_attn_scalar=24, sliding_window=4, rope_parameters=_GEMMA_ROPE,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "mixtral": lambda: transformers.MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_SHAPE, **_EXPERTS, shared_expert_intermediate_size=20),
    "qwen2_moe_unbiased": lambda: transformers.Qwen2MoeConfig(
        **_SHAPE, **_EXPERTS, shared_expert_intermediate_size=20, qkv_bias=False),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "olmoe": lambda: transformers.OlmoeConfig(**_SHAPE, num_experts=5, num_experts_per_tok=3),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice: in torch, and in a directory from which `model` and `params` were loaded."""

    torch: Any
    directory: Path
    model: Transformer
    params: Any


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """`pair(name)` of the table above; every parameter is random, norms and biases included."""

    @functools.cache
    def make(name: str) -> Pair:
        config = CONFIGS[name]()
        generator = torch.Generator().manual_seed(len(name))
        reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, parameter in reference.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                gemma = config.model_type == "gemma3_text"  # scales its embeddings up, stores norms around zero
                size = 0.3 if "embed" not in key else 0.1 if gemma else 0.5
                parameter.copy_(noise * size + (1.0 if "norm" in key and not gemma else 0.0))
        directory = tmp_path_factory.mktemp(name)
        reference.save_pretrained(directory)
        config, params = weights.load(directory)
        return Pair(reference, directory, Transformer(config), params)

    return make
