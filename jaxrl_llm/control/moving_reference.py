"""T1's dynamic anchor: a reference policy that follows the trained one (arXiv 2501.11651; form reconstructed)."""
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.control.base import Controller, controller


@controller
def moving_reference(*, decay: float = 0.99, every: int = 1) -> Controller:
    """`reference`, the parameters that give `ref_logprobs`: `decay * reference + (1 - decay) * params` every `every` steps.

    `decay=0` with `every=M` is an anchor that the policy replaces every M steps, the other reading of the paper. `init(params)`
    starts it as a copy of the policy. Facts: `params` after the step. Raises ValueError for less than one step.
    """
    if every < 1:
        raise ValueError(f"every={every}; the reference moves after this number of steps, 1 or more")

    def moved(anchor: Any, params: Any) -> Any:
        return optax.incremental_update(params, anchor, 1 - decay)

    def begun(params: Any) -> Any:
        return jax.tree.map(jnp.array, params)

    if every == 1:
        return Controller(begun, lambda anchor: {"reference": anchor}, lambda anchor, facts: moved(anchor, facts["params"]),
                          facts=("params",), knobs=("reference",))

    def observe(state, facts):
        anchor, steps = state[0], state[1] + 1
        due = steps % every == 0
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), moved(anchor, facts["params"]), anchor), steps

    return Controller(lambda params: (begun(params), jnp.int32(0)), lambda state: {"reference": state[0]}, observe,
                      facts=("params",), knobs=("reference",))
