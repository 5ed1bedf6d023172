"""The text part of Qwen2-VL and Qwen2.5-VL: Qwen2.5, whose rotary embedding in three axes is the plain one for text."""
from jaxrl_llm.models.families import qwen2
from jaxrl_llm.models.families.family import Family, Gguf


def _prepare(raw):
    """All three positions of a text token are the same: which sections of the frequencies they turn does not matter."""
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) == "mrope":
        raw["rope_scaling"] = None
    return raw


FAMILY = Family(
    name="qwen2_5_vl_text",
    architecture="Qwen2_5_VLForConditionalGeneration",
    title="Qwen2.5-VL (text)",
    defaults=qwen2.FAMILY.defaults | {
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6},
    fixed=qwen2.FAMILY.fixed,
    layer_types=True,
    multimodal=("qwen2_5_vl", "qwen2_vl", "qwen2_vl_text"),
    prepare=_prepare,
    written_as="qwen2",
    gguf=Gguf("qwen2vl"),
)
