"""What a value model is: pure functions that predict returns from features and learn from what came."""
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

State = Any


class Value(NamedTuple):
    """`init() -> state`; `predict(state, features [..., F]) -> f32[...]`; `observe(...) -> state`, all pure.

    `observe(state, features [P, G, F], targets [P, G], valid bool[P, G])` takes in what a batch of rollouts showed. States
    are pytrees of static shapes, to be saved with a run.
    """

    init: Callable[[], State]
    predict: Callable[[State, Array], Array]
    observe: Callable[[State, Array, Array, Array], State]
