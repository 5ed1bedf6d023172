"""The interface of a value model: pure functions that predict returns from features and learn from observed ones."""
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

State = Any


class Value(NamedTuple):
    """`init() -> state`; `predict(state, features [..., F]) -> f32[...]`; `observe(...) -> state`, all pure.

    `observe(state, features [P, G, F], targets [P, G], valid bool[P, G])` learns from a batch of rollouts. States are
    pytrees of static shapes, which are saved with a run.
    """

    init: Callable[[], State]
    predict: Callable[[State, Array], Array]
    observe: Callable[[State, Array, Array, Array], State]
