"""A moving average of the trained weights, kept beside them: smoother than the last weights, and not used in training.

`average = decay * average + (1 - decay) * weights` after every update, from the weights before the first one on
(Polyak averaging with a fixed horizon of about 1 / (1 - decay) updates).
"""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.learning.state import TrainState


def begun(state: TrainState, decay: float) -> TrainState:
    """The state with an average equal to the trained weights, as copies; without an average if `decay` is 0."""
    return state.replace(average=jax.tree.map(jnp.copy, state.trainable)) if decay else state


def moved(state: TrainState, decay: float) -> TrainState:
    """The state with its average after an update; the old average is consumed. A refused update left the weights unchanged."""
    return state.replace(average=_moved(state.trainable, state.average, 1 - decay)) if decay else state


@functools.partial(jax.jit, donate_argnums=1)
def _moved(weights: Any, average: Any, share: float) -> Any:
    return optax.incremental_update(weights, average, share)
