"""What sampling sees of learning."""
from typing import Any, NamedTuple

import jax

from jaxrl_llm.control import Settings


class Snapshot(NamedTuple):
    """The policy and the settings at one version, made by `Learner.publish`.

    Attributes:
      version: number of batches that the weights have learned from.
      params, lora: the weights, and adapters on them or None.
      key: the run's typed PRNG key; uids are folded into it.
      settings: what controllers set.
      prior: the state of the predictions of prompts, see `training.prior`; None without them.
    """

    version: int
    params: Any
    lora: Any
    key: jax.Array
    settings: Settings = Settings()
    prior: Any = None
