"""Models of transformers as GGUF files: names from the gguf package, layout as llama.cpp's converter leaves it."""
import math
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {  # where names differ
    "gemma3_text": "gemma3", "qwen2_5_vl": "qwen2vl", "olmo3": "olmo2", "mistral": "llama", "mixtral": "llama",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}
_IN_PAIRS = ("llama", "granite", "smollm3")  # rows of queries and keys are put into adjacent rotary pairs
_NUMBERS = {  # attribute of a config -> method of the writer
    "sliding_window": "add_sliding_window", "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping", "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale", "attention_multiplier": "add_attention_scale",
    "logits_scaling": "add_logit_scale", "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
}


def write(path: Path, reference: Any, metadata: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None,
          skip: tuple[str, ...] = ()) -> Path:
    """Writes a model in float32, with other or further `metadata` and `tensors`, without those to `skip`."""
    import gguf

    config = reference.config.get_text_config()
    architecture = ARCHITECTURES.get(reference.config.model_type, reference.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    _describe(writer, config, head_dim, rope)
    if getattr(config, "layer_types", None) and architecture in ("olmo2", "gemma3"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    stored = dict(tensors or {})
    if rope["rope_type"] == "longrope":
        stored |= {f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")}
    tied = reference.config.tie_word_embeddings
    for name, tensor in reference.state_dict().items():
        if "visual" in name or name == "lm_head.weight" and tied:
            continue
        if ".experts." in name or "shared_expert_gate" in name:
            stored = _of_experts(name, tensor.numpy()) | stored
            continue
        tensor = tensor.numpy()
        if architecture in _IN_PAIRS and ("q_proj" in name or "k_proj" in name):  # halves (i, i + d/2) become neighbours
            halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if "gemma" in architecture and "norm" in name:
            tensor = tensor + np.float32(1.0)
        theirs = names.get_name(name.replace("model.language_model.", "model."), try_suffixes=(".weight", ".bias"))
        stored.setdefault(theirs, tensor)
    for name, tensor in stored.items():
        if name not in skip:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _of_experts(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of a mixture: the experts of a layer in one tensor, gates apart from the other half, one row as a vector."""
    block = f"blk.{name.split('.')[2]}"
    if name.endswith("gate_up_proj"):
        gate, up = np.split(tensor, 2, axis=1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    if name.endswith("down_proj"):
        return {f"{block}.ffn_down_exps.weight": tensor}
    return {f"{block}.ffn_gate_inp_shexp.weight": tensor[0]}


def _describe(writer, config, head_dim, rope):
    import gguf

    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if (local := config.rope_parameters.get("sliding_attention")):
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if (experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None))):
        writer.add_expert_count(experts)
    for attribute, method in _NUMBERS.items():
        if getattr(config, attribute, None) is not None:
            getattr(writer, method)(getattr(config, attribute))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        longer = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
