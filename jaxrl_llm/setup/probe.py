"""The states of the policy that `config.probe` names."""
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxrl_llm.environments.parsers import CLOSE, OPEN
from jaxrl_llm.learning.policy import Capture
from jaxrl_llm.tools import key_values
from jaxrl_llm.values import features


def capture_of(config: ConfigDict, tokenizer, num_layers: int) -> Capture:
    """The states that `config.probe` reads of a model with `num_layers` blocks; ValueError if there is no such block."""
    p = config.probe
    try:
        layer = float(p.layer) if "." in p.layer else int(p.layer)
    except ValueError:
        raise ValueError(f"config.probe.layer={p.layer!r}; give the number of a block such as 19, or a share of the depth "
                         "such as 0.55") from None
    marker, *call = (tuple(tokenizer.encode(text)) for text in (p.think_end, OPEN, CLOSE))
    return Capture(features.layer_index(layer, num_layers), p.pool, marker, (call[0], call[1]))


def keys(c: ConfigDict) -> None:
    """POISE's probe."""
    c.probe = ConfigDict()             # POISE: the baseline is a probe on the policy's hidden states
    c.probe.layer = "0.55"             # output of this block: an index (-1: the last), or a fraction of the depth
    c.probe.pool = 10                  # last prompt tokens and last reasoning tokens whose states are averaged
    c.probe.think_end = "</think>"     # text that ends the reasoning (not in a <tool_call>); without it all is reasoning


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 1, "probe.pool")
