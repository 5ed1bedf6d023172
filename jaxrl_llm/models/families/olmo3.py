"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary frequencies are never scaled."""
from jaxrl_llm.models.families import olmo2
from jaxrl_llm.models.families.family import ATTENTION_BIAS, Family, Gguf, layer_types_in_gguf, windows_but_every

_PERIOD = 4

FAMILY = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    title="OLMo 3",
    defaults=olmo2.FAMILY.defaults | {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096,
                                      "layer_types": windows_but_every(lambda raw: _PERIOD)},
    keys=ATTENTION_BIAS,
    fixed=olmo2.FAMILY.fixed,
    layer_types=True,
    names=olmo2.FAMILY.names,
    gguf=Gguf("olmo2", only_with="attention.sliding_window", keys={"attention.sliding_window": "sliding_window"},
              derived=lambda metadata, raw: {"rope_local_base_freq": raw["rope_theta"]} | layer_types_in_gguf(
                  metadata, raw, _PERIOD)),
)
