"""The table of differences that a family's file holds, and the values that families share."""
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.families.mixture import Mixture

Raw = Mapping[str, Any]  # the contents of a config.json


class TranslatedKey(NamedTuple):
    """A key of `config.json` whose value is a field of `ModelConfig` in another form."""

    name: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Gguf:
    """How a family's GGUF files differ from the common ones.

    Attributes:
      architecture: value of `general.architecture`.
      keys: metadata keys, without the architecture's name -> keys of `config.json` with the same value; absent ones take the
        family's defaults.
      required: those of `keys` without which a file is refused.
      derived: `(metadata by key, config.json so far) -> keys of config.json`, for keys that need more than another name.
      paired: rows of queries and keys lie in adjacent rotary pairs (2i, 2i + 1).
      only_with: a metadata key that marks the family, where two share an architecture; the later of their names wins.
    """

    architecture: str
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()
    derived: Callable[[Raw, Raw], dict] = lambda get, raw: {}
    paired: bool = False
    only_with: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
      name: `model_type` in `config.json`.
      architecture: its class in transformers.
      title: what people call its models.
      defaults: values that transformers gives to keys that a config omits; a function of the other keys also replaces null.
      keys: field of `ModelConfig` -> key beyond `KEYS`, or another one.
      fixed: fields that no key states; a function is one of the fields read so far.
      layer_types: whether `layer_types` and with them sliding windows are read; without, `defaults` may still derive them.
      names: module -> its name in Hugging Face files and in GGUF files, beyond `layout.NAMES`. Modules of the same name share
        one tensor, in the order of the table.
      paired: rows of queries and keys lie in adjacent rotary pairs (2i, 2i + 1).
      mixture: the experts that replace the MLP; None: dense.
      multimodal: `model_type` of the multimodal models whose text part this is.
      prepare: converts a config of an older or another form to the current one.
      written_as: the family in whose format its models are saved, with the same architecture and names.
      gguf: differences of its GGUF files; None: these are not read.
    """

    name: str
    architecture: str
    title: str
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: dict[str, str | TranslatedKey] = dataclasses.field(default_factory=dict)
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    layer_types: bool = False
    names: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    paired: bool = False
    mixture: Mixture | None = None
    multimodal: tuple[str, ...] = ()
    prepare: Callable[[dict], dict] = lambda raw: raw
    written_as: str | None = None
    gguf: Gguf | None = None

    def key(self, field: str) -> TranslatedKey | None:
        """Where `config.json` states a field; None: nowhere."""
        entry = (KEYS | self.keys).get(field)
        return TranslatedKey(entry, lambda value: value, lambda value: value) if isinstance(entry, str) else entry

    def stated(self) -> set[str]:
        """All keys of `config.json` that are fields."""
        return {self.key(field).name for field in self.fields()}

    def read_keys(self) -> set[str]:
        """All keys of `config.json` that are read, except those that must have their plain value."""
        mixture = () if self.mixture is None else self.mixture.read_keys()
        return self.stated() | DEFAULTS.keys() | self.defaults.keys() | {*_ALWAYS, *mixture}

    def fields(self) -> tuple[str, ...]:
        """Fields that `config.json` states, except those of rotary embeddings and windows."""
        return tuple(KEYS | self.keys)


ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # their name -> ours
_THEIRS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def activation(name: str) -> TranslatedKey:
    """The activation function under the key `name`."""
    return TranslatedKey(name, ACTIVATIONS.__getitem__, _THEIRS.__getitem__)


KEYS: dict[str, str | TranslatedKey] = {  # field of ModelConfig -> key of config.json, for all families
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "mlp_size": "intermediate_size", "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "activation": activation("hidden_act"),
}
ATTENTION_BIAS: dict[str, str | TranslatedKey] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
PLAIN = {  # key -> values with which the architecture is the plain one; others are refused unless the family reads the key
    "partial_rotary_factor": (None, 1.0),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bidirectional_attention", "final_logit_softcapping",
                     "attn_logit_softcapping", "quantization_config", "clip_qkv"), (None, False)),
}
_ALWAYS = ("layer_types", "sliding_window", "use_sliding_window", "rope_local_base_freq", "rope_scaling", "rope_parameters",
           "original_max_position_embeddings")  # read of every family that has them
DEFAULTS = {
    "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "num_key_value_heads": lambda raw: raw["num_attention_heads"],
    "head_dim": lambda raw: raw["hidden_size"] // raw["num_attention_heads"],
}


def query_scalar(name: str = "query_pre_attn_scalar") -> TranslatedKey:
    """The attention scale as one over the root of the value of a key."""
    return TranslatedKey(name, lambda scalar: scalar**-0.5, lambda scale: round(scale**-2))


def windows_from(first: Callable[[Raw], int]) -> Callable[[Raw], list[str]]:
    """`layer_types` of a config without them, with windows from layer number `first(raw)` on."""
    return lambda raw: ["sliding_attention" if i >= first(raw) else "full_attention" for i in range(raw["num_hidden_layers"])]


def windows_but_every(period: Callable[[Raw], int]) -> Callable[[Raw], list[str]]:
    """`layer_types` of a config without them, with windows in all layers but every `period(raw)`th."""
    return lambda raw: ["sliding_attention" if (i + 1) % period(raw) else "full_attention"
                        for i in range(raw["num_hidden_layers"])]


def layer_types_in_gguf(metadata: Raw, raw: Raw, period: int) -> dict:
    """`layer_types` from `attention.sliding_window_pattern`: whether each layer has a window, or which period sees everything.

    A period of 0 means no window; for files without the key the `period` of their architecture holds.
    """
    pattern = metadata.get("attention.sliding_window_pattern", period)
    if type(pattern) is not int and not (isinstance(pattern, list) and all(type(one) in (bool, int) for one in pattern)):
        raise ValueError(f"attention.sliding_window_pattern={str(pattern)[:80]!r}; expected a period or a list of flags")
    if not isinstance(pattern, list):
        pattern = [pattern > 0 and (i + 1) % pattern != 0 for i in range(raw["num_hidden_layers"])]
    return {"layer_types": ["sliding_attention" if local else "full_attention" for local in pattern]}
