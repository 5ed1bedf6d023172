"""A tiny checkpoint of every family, with random weights, made and saved by transformers."""
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.models import families

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None)
_BIASES = dict(attention_bias=True, mlp_bias=True)
_ALTERNATE = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
_LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
_DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
_MINISTRAL3 = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=96, mscale=1.0,
                   mscale_all_dim=0.5, llama_4_scaling_beta=0.1)
_LONG = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.0],
             long_factor=[2.0, 4.0, 8.0])
_GEMMA3 = {"full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1000.0),
           "sliding_attention": dict(rope_type="default", rope_theta=100.0)}
_OLMO3 = {"full_attention": _YARN, "sliding_attention": dict(rope_type="default", rope_theta=1e4)}
_MULTIPLIERS = dict(embedding_multiplier=6.0, attention_multiplier=0.25, residual_multiplier=0.4, logits_scaling=4.0)
_MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 1, 1])
_VISION = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


class TinyConfig(NamedTuple):
    """A tiny `config.json`: its `model_type` and own keys.

    shows: the feature of the family that it tests.  gguf: whether GGUF can state it.  vision: config of a vision part, if any.
    """

    model_type: str
    keys: dict[str, Any]
    shows: str = ""
    gguf: bool = True
    vision: dict[str, Any] | None = None

    @property
    def family(self) -> families.Family:
        return families.of_model_type(self.model_type, "checkpoint")

    @property
    def title(self) -> str:
        return self.family.title + (f": {self.shows}" if self.shows else "")


CHECKPOINTS = {
    "llama": TinyConfig("llama", dict(tie_word_embeddings=True)),
    "llama_bias": TinyConfig("llama", _BIASES, "biases"),
    "llama_llama3": TinyConfig("llama", dict(rope_parameters=_LLAMA3), "rope of 3.1", gguf=False),
    "llama_yarn": TinyConfig("llama", dict(rope_parameters=_YARN), "YaRN"),
    "llama_dynamic": TinyConfig("llama", dict(rope_parameters=_DYNAMIC), "dynamic NTK", gguf=False),
    "qwen2": TinyConfig("qwen2", {}),
    "qwen3": TinyConfig("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": TinyConfig("gemma2", dict(head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=4.0,
                                        attn_logit_softcapping=3.0) | _ALTERNATE),
    "gemma3_text": TinyConfig("gemma3_text", dict(head_dim=16, query_pre_attn_scalar=16, rope_parameters=_GEMMA3) | _ALTERNATE),
    "mistral": TinyConfig("mistral", dict(head_dim=16, sliding_window=5)),
    "ministral": TinyConfig("ministral", dict(head_dim=16) | _ALTERNATE),
    "ministral3": TinyConfig("ministral3", dict(head_dim=16, rope_parameters=_MINISTRAL3)),
    "phi3": TinyConfig("phi3", dict(sliding_window=5)),
    "phi3_longrope": TinyConfig("phi3", dict(rope_parameters=_LONG, original_max_position_embeddings=96),
                                "longrope, part rotated"),
    "smollm3": TinyConfig("smollm3", dict(num_hidden_layers=4)),
    "olmo2": TinyConfig("olmo2", {}),
    "olmo3": TinyConfig("olmo3", dict(rope_parameters=_OLMO3) | _ALTERNATE),
    "granite": TinyConfig("granite", _BIASES | _MULTIPLIERS),
    "qwen2_5_vl_text": TinyConfig("qwen2_5_vl", dict(rope_parameters=_MROPE), vision=_VISION),
    "glm": TinyConfig("glm", dict(head_dim=16)),
    "glm4": TinyConfig("glm4", dict(head_dim=16)),
    "mixtral": TinyConfig("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": TinyConfig("qwen2_moe", _EXPERTS | dict(shared_expert_intermediate_size=20)),
    "qwen3_moe": TinyConfig("qwen3_moe", _EXPERTS | dict(head_dim=16, norm_topk_prob=True)),
    "olmoe": TinyConfig("olmoe", dict(num_experts=5, num_experts_per_tok=3)),
}


def make(name: str, directory: Path) -> Any:
    """Saves a checkpoint, every parameter random, norms and biases included; returns the model in transformers."""
    import torch
    import transformers

    checkpoint = CHECKPOINTS[name]
    keys, auto = SHAPE | checkpoint.keys, transformers.AutoModelForCausalLM
    if checkpoint.vision is not None:
        keys, auto = dict(text_config=keys, vision_config=checkpoint.vision), transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model(checkpoint.model_type, **keys)
    model, generator = auto.from_config(config, attn_implementation="eager").eval(), torch.Generator().manual_seed(len(name))
    gemma = "gemma" in name  # scales its embeddings up, stores norms around zero
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            size = 0.3 if "embed" not in key else 0.1 if gemma else 0.5
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.copy_(noise + (1.0 if "norm" in key and not gemma else 0.0))
    model.save_pretrained(directory)
    return model
