"""ReMix: rollouts of recent policies first, plain on-policy training from a switch on (arXiv 2507.06892)."""
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


def policy_ages(key: Array, rows: int, stored: int | Array, *, reuse: float = 0.4, max_age: int = 2) -> Array:
    """i32[rows]: 0 for a fresh trajectory, i for one of the policy i steps back.

    With probability `reuse` i is uniform in 1 .. min(max_age, stored), `stored` the number of earlier policies with stored
    trajectories; with `stored=0` all are fresh, as after the switch to on-policy training.
    """
    which, age = jax.random.split(key)
    oldest = jnp.minimum(max_age, stored)
    ages = jax.random.randint(age, (rows,), 1, jnp.maximum(oldest, 1) + 1)
    return jnp.where(jax.random.bernoulli(which, reuse, (rows,)) & (oldest > 0), ages, 0)


class Base(NamedTuple):
    """The base policy of the KL term, and whether the run has switched to on-policy training, bool[]."""

    params: Any
    switched: Array


@controller
def remix(*, switch: int = 50) -> Controller:
    """`reference`: the first policy, from step `switch` on the policy of that moment; `epochs`: from then on 1.

    The paper's values are 50 and 100. The rule `recent_groups` stops its replay by a number of its own, `until`. A step in
    which nothing is learned does not switch: the next one does. Facts: `step`, `params`. Raises ValueError: a switch before the
    first step.
    """
    if switch < 1:
        raise ValueError(f"switch={switch}; give the number of steps before the switch, 1 or more")

    def observe(base, facts):
        due = facts["step"] + 1 >= switch
        params = jax.tree.map(lambda old, new: jnp.where(due & ~base.switched, new, old), base.params, facts["params"])
        return Base(params, base.switched | due)

    def propose(base):
        return {"reference": base.params, "epochs": jnp.where(base.switched, 1, jnp.iinfo(jnp.int32).max)}

    return Controller(lambda params: Base(jax.tree.map(jnp.array, params), jnp.array(False)), propose, observe,
                      facts=("step", "params"), knobs=("reference", "epochs"))
