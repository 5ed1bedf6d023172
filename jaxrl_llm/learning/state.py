"""The complete state of a run as one pytree: after saving and loading it the run continues unchanged."""
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.objectives.base import Objective


class TrainState(flax.struct.PyTreeNode):
    """State of a run between two steps.

    Attributes:
      step: `i32[]`, rollout batches consumed.
      params: float32 master weights.
      lora: adapter tree, or None. If there is one, only it is trained.
      opt_state: the optimiser's state for the trained parameters.
      key: typed PRNG key of the run; all others are folded from it and a number, so it never changes.
      estimator_state, objective_state: states of the method's parts.
      skipped: `i32[]`, updates refused because loss or gradient was not finite.
      skipped_in_row: `i32[]`, the number of refused updates since the last accepted one.
      beside: states of models that recorders train beside the policy, by name, see `recorders.Recorder.fit`, for instance
        `values.critic.CriticState`.
      control: states of the run's controllers by name, see `learning.controls`, for instance the statistics of each prompt
        from earlier rollouts, `control["prior"]`, see `sampling.prior`.
      replayed: states of the estimator and the objective of replayed batches, see `Learner.rehearsal`; None without any.
      average: moving average of the trained parameters, or None, see `learning.average`.
    """

    step: jax.Array
    params: Any
    lora: Any
    opt_state: Any
    key: jax.Array
    estimator_state: Any
    objective_state: Any
    skipped: jax.Array
    skipped_in_row: jax.Array
    beside: Mapping[str, Any] = flax.struct.field(default_factory=dict)
    control: Mapping[str, Any] = flax.struct.field(default_factory=dict)
    replayed: Any = None
    average: Any = None

    @property
    def trainable(self):
        """The tree that the optimiser updates."""
        return self.params if self.lora is None else self.lora

    def with_trainable(self, tree):
        params, lora = with_trained(self.params, self.lora, tree)
        return self.replace(params=params, lora=lora)


def with_trained(params, lora, tree):
    """`(params, lora)` with `tree` instead of the trained parameters: the adapters if there are any, else the weights."""
    return (tree, None) if lora is None else (params, tree)


def create(params, lora, optimizer: optax.GradientTransformation, estimator: Estimator, objective: Objective,
           key: jax.Array) -> TrainState:
    """The state before the first step. Every leaf is a separate array, so that the whole state can be donated."""
    def zero():
        return jnp.zeros((), jnp.int32)
    return TrainState(step=zero(), params=params, lora=lora, opt_state=optimizer.init(params if lora is None else lora),
                      key=key, estimator_state=estimator.init(), objective_state=objective.init(),
                      skipped=zero(), skipped_in_row=zero())
