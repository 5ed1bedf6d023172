"""Names of the variants that recipes have: a published model and a machine, `qwen2.5_1.5b-h100-8`."""
from jaxrl_llm.registry import one_of

# Variant: the row of `presets.MODELS`, and where its weights are looked for.
PUBLISHED = {
    "smollm2": ("smollm2_135m", "models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "qwen2.5_0.5b": ("qwen2.5_0.5b", "models/Qwen2.5-0.5B-Instruct"),
    "qwen2.5_1.5b": ("qwen2.5_1.5b", "models/Qwen2.5-1.5B-Instruct"),
    "qwen2.5_7b": ("qwen2.5_7b", "models/Qwen2.5-7B-Instruct"),
    "qwen3_0.6b": ("qwen3_0.6b", "models/Qwen3-0.6B"),
    "qwen3_1.7b": ("qwen3_1.7b", "models/Qwen3-1.7B"),
    "qwen3_4b": ("qwen3_4b", "models/Qwen3-4B"),
    "qwen3_8b": ("qwen3_8b", "models/Qwen3-8B"),
    "gemma3_1b": ("gemma3_1b", "models/gemma-3-1b-it"),
}
MACHINES = ("cpu", "h100", "h100-8", "v5e-8", "v5p-64")


def parse(variant: str) -> tuple[str, str]:
    """Model and machine of a variant; ValueError with the names that there are."""
    model, _, machine = variant.partition("-")
    return one_of("model of a recipe", model, PUBLISHED), one_of("machine of a recipe", machine, MACHINES)
