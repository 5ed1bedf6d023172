"""The states of the policy that `config.probe` names."""
from ml_collections import ConfigDict

from jaxrl_llm.environments.parsers import CLOSE, OPEN
from jaxrl_llm.learning.policy import Capture
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
