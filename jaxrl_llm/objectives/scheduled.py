"""An objective whose numbers follow schedules, such as a term's coefficient that falls from 0.1 to 0."""
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.objectives.schedules import Schedule

_LOGITS = 2**16  # of a function of the logits at one position, which is traced alone


class Counted(NamedTuple):
    """The state of the wrapped objective, and the number of updates so far, i32[], see `learning.optimizers.at_update`."""

    inner: Any
    updates: Array


def scheduled(make: Callable[..., Objective], numbers: Mapping[str, Schedule], per_step: int = 1) -> Objective:
    """The objective `make(**numbers)` with the numbers of step `updates // per_step`, `updates` counting past updates.

    Its needs and weights are those of `make` with all numbers nonzero. The metric `objective/NAME` is the current number.
    Raises ValueError: the code branches on a number, or weights or the function of logits depend on it: only coefficients of
    loss terms can be scheduled.
    """
    first = dict.fromkeys(numbers, jnp.ones((), jnp.float32))

    def made(now: Mapping[str, Array]) -> Objective:
        try:
            return make(**now)
        except jax.errors.ConcretizationTypeError as error:
            raise _refused(numbers) from error

    def check_apart(traced: Callable[[Mapping[str, Array]], Any]) -> None:
        """Raises ValueError if the numbers are among what is computed."""
        program = jax.make_jaxpr(traced)(first).jaxpr
        given = {id(variable) for variable in program.invars}
        if any(id(one) in given for line in program.eqns for one in line.invars):
            raise _refused(numbers)

    jax.eval_shape(lambda now: made(now).init(), first)  # traced as in an update
    plain = make(**first)
    def at_position(now: Mapping[str, Array]) -> Array | None:
        position = made(now).position  # the policy measures it, without any state
        return None if position is None else position(jnp.zeros(_LOGITS), jnp.int32(0), jnp.uint32(0))

    check_apart(at_position)

    def weights(rollouts):
        check_apart(lambda now: made(now).weights(rollouts))
        return plain.weights(rollouts)

    def current(state: Counted) -> dict[str, Array]:
        return {name: jnp.asarray(schedule(state.updates // per_step), jnp.float32) for name, schedule in numbers.items()}

    def loads(*arguments):
        *loaded, state = arguments
        return made(current(state)).loads(*loaded, state.inner)

    def update(logprobs, rollouts, advantages, state):
        now = current(state)
        try:
            loss, (metrics, inner) = made(now).update(logprobs, rollouts, advantages, state.inner)
        except jax.errors.ConcretizationTypeError as error:
            raise _refused(numbers) from error
        share = (plain.weights(rollouts) if rollouts.loss_weights is None else rollouts.loss_weights)["token"]
        part = masked.sum(share, rollouts.token_mask)  # this part's share of the mini-batch: metrics of the parts add up
        metrics |= {f"objective/{name}": value * part for name, value in now.items()}
        return loss, (metrics, Counted(inner, state.updates + 1))

    return plain._replace(init=lambda: Counted(plain.init(), jnp.int32(0)), update=update, weights=weights,
                          loads=None if plain.loads is None else loads)


def _refused(numbers: Mapping[str, Schedule]) -> ValueError:
    return ValueError(f"{', '.join(numbers)} of this objective cannot follow a schedule: what is computed, or how rollouts are "
                      "weighed, depends on it. Give a number, or schedule a coefficient of the loss such as that of kl(...)")
