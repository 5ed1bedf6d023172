"""SimpleTIR: rollouts with a turn that has neither code nor an answer are not trained on (arXiv 2509.02479)."""
import re

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.rewards.math import last_boxed

_CODE = re.compile(r"```python\n.*?```", re.DOTALL)


def is_void(turn: str) -> bool:
    r"""Whether a finished turn of the model has neither a closed python block nor a closed `\boxed{}`.

    Generation stops after such a turn. A turn that was cut off before either is void as well.
    """
    return _CODE.search(turn) is None and last_boxed(turn) is None


def free_of_void(void_PGT: Array, mask_PGT: Array, valid_PG: Array) -> Array:
    """bool[P, G]: valid rollouts without a trained token of a void turn (`void` marks the tokens of such turns)."""
    return valid_PG & ~jnp.any(void_PGT & mask_PGT, axis=-1)


@prompt_filter
def simpletir_filter() -> Filter:
    """Rollouts that are `free_of_void` turns; `extras["void"]` bool[P, G, T] marks the tokens of such turns."""

    def keep(rollouts):
        return free_of_void(rollouts.extras["void"], rollouts.mask, rollouts.valid)

    return Filter(keep, needs=("void",), per="rollout")
