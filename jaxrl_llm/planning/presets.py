"""Published sizes of models and of accelerators: plans for them need neither a download nor the hardware."""
import dataclasses
import re

from jaxrl_llm.models.config import Experts, ModelConfig
from jaxrl_llm.tools.registry import unknown


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator as jax counts them: a GPU, or a TPU chip.

    Attributes:
      name: as in `DEVICES`.
      memory: bytes of device memory.
      flops: dense bfloat16 operations per second at its peak.
      bandwidth: bytes per second between memory and compute.
      measured: whether estimates for devices of this kind were compared with enough runs to need no margin.
      parts: units per chip in the number of a slice's name (v4 and v5p slices are named by cores, two per chip).
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    parts: int = 1
    measured: bool = False


# From the vendors' data sheets; GPUs are the SXM versions.
DEVICES = {device.name: device for device in (Device("a100-80", 80e9, 312e12, 2.039e12), Device("h100", 80e9, 989e12, 3.35e12),
                                              Device("h200", 141e9, 989e12, 4.8e12),
                                              Device("v4", 32e9, 275e12, 1.228e12, parts=2),
                                              Device("v5e", 16e9, 197e12, 0.819e12),
                                              Device("v5p", 95e9, 459e12, 2.765e12, parts=2),
                                              Device("v6e", 32e9, 918e12, 1.64e12))}


def parse_devices(text: str) -> tuple[Device, int]:
    """`"h100-8"` as 8 GPUs, `"v5p-64"` as a slice of 64 cores, that is 32 chips; without a number it is 1 chip.

    Raises ValueError: an unknown device, or a number of cores that is not a whole number of chips.
    """
    name, count = text, None
    if text not in DEVICES and (match := re.fullmatch(r"(.+)-(\d+)", text)):
        name, count = match[1], int(match[2])
    name = {"v5litepod": "v5e", "a100": "a100-80"}.get(name, name)
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    device = DEVICES[name]
    if count is None:
        return device, 1
    if count < 1 or count % device.parts:
        raise ValueError(f"{text!r}: {name} slices are named by cores, {device.parts} per chip; give a multiple of "
                         f"{device.parts}, at least {device.parts}")
    return device, count // device.parts


def _model(vocab, hidden, layers, heads, kv_heads, head, mlp, *, tie, **other) -> ModelConfig:
    return ModelConfig(vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
                       head_dim=head, mlp_size=mlp, tie_embeddings=tie, **other)


def _gemma3(hidden, layers, heads, kv_heads, mlp, window, vocab=262_208) -> ModelConfig:
    local = tuple((i + 1) % 6 != 0 for i in range(layers))
    return _model(vocab, hidden, layers, heads, kv_heads, 256, mlp, tie=True, qk_norm=True, post_norms=True, window=window,
                  local_layers=local, activation="gelu_tanh", norm_offset=1.0)


# Sizes alone: rotary bases and the like are left at their defaults, so weights cannot be loaded into these.
MODELS = {
    "smollm2_135m": _model(49_152, 576, 30, 9, 3, 64, 1536, tie=True),
    "smollm2_360m": _model(49_152, 960, 32, 15, 5, 64, 2560, tie=True),
    "smollm2_1.7b": _model(49_152, 2048, 24, 32, 32, 64, 8192, tie=True),
    "qwen2.5_0.5b": _model(151_936, 896, 24, 14, 2, 64, 4864, tie=True, qkv_bias=True),
    "qwen2.5_1.5b": _model(151_936, 1536, 28, 12, 2, 128, 8960, tie=True, qkv_bias=True),
    "qwen2.5_3b": _model(151_936, 2048, 36, 16, 2, 128, 11_008, tie=True, qkv_bias=True),
    "qwen2.5_7b": _model(152_064, 3584, 28, 28, 4, 128, 18_944, tie=False, qkv_bias=True),
    "qwen2.5_14b": _model(152_064, 5120, 48, 40, 8, 128, 13_824, tie=False, qkv_bias=True),
    "qwen2.5_32b": _model(152_064, 5120, 64, 40, 8, 128, 27_648, tie=False, qkv_bias=True),
    "qwen3_0.6b": _model(151_936, 1024, 28, 16, 8, 128, 3072, tie=True, qk_norm=True),
    "qwen3_1.7b": _model(151_936, 2048, 28, 16, 8, 128, 6144, tie=True, qk_norm=True),
    "qwen3_4b": _model(151_936, 2560, 36, 32, 8, 128, 9728, tie=True, qk_norm=True),
    "qwen3_8b": _model(151_936, 4096, 36, 32, 8, 128, 12_288, tie=False, qk_norm=True),
    "qwen3_14b": _model(151_936, 5120, 40, 40, 8, 128, 17_408, tie=False, qk_norm=True),
    "qwen3_32b": _model(151_936, 5120, 64, 64, 8, 128, 25_600, tie=False, qk_norm=True),
    "qwen3_30b_a3b": _model(151_936, 2048, 48, 32, 4, 128, 6144, tie=False, qk_norm=True, experts=Experts(128, 8, 768)),
    "qwen3_235b_a22b": _model(151_936, 4096, 94, 64, 4, 128, 12_288, tie=False, qk_norm=True, experts=Experts(128, 8, 1536)),
    "qwen1.5_moe_a2.7b": _model(151_936, 2048, 24, 16, 16, 128, 5632, tie=False, qkv_bias=True,
                                experts=Experts(60, 4, 1408, normalize=False, shared_size=5632)),
    "mixtral_8x7b": _model(32_000, 4096, 32, 32, 8, 128, 14_336, tie=False, experts=Experts(8, 2, 14_336)),
    "olmoe_1b_7b": _model(50_304, 2048, 16, 16, 16, 128, 1024, tie=False, qk_norm=True, qk_norm_whole=True,
                          experts=Experts(64, 8, 1024, normalize=False)),
    "llama3.2_1b": _model(128_256, 2048, 16, 32, 8, 64, 8192, tie=True),
    "llama3.2_3b": _model(128_256, 3072, 28, 24, 8, 128, 8192, tie=True),
    "llama3_8b": _model(128_256, 4096, 32, 32, 8, 128, 14_336, tie=False),
    "llama3_70b": _model(128_256, 8192, 80, 64, 8, 128, 28_672, tie=False),
    "gemma3_270m": _gemma3(640, 18, 4, 1, 2048, 512, vocab=262_144),
    "gemma3_1b": _gemma3(1152, 26, 4, 1, 6912, 512, vocab=262_144),
    "gemma3_4b": _gemma3(2560, 34, 8, 4, 10_240, 1024),
    "gemma3_12b": _gemma3(3840, 48, 16, 8, 15_360, 1024),
}
