"""T1's dynamic anchor: a reference policy that follows the trained one (arXiv 2501.11651; form reconstructed)."""
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.control.base import Controller, controller


@controller
def moving_reference(*, decay: float = 0.99) -> Controller:
    """`reference`, the parameters that give `ref_logprobs`: `decay * reference + (1 - decay) * params` at each update.

    `init(params)` starts it as a copy of the policy. Facts: `params` after the update.
    """

    def observe(anchor, facts):
        return optax.incremental_update(facts["params"], anchor, 1 - decay)

    return Controller(lambda params: jax.tree.map(jnp.array, params), lambda anchor: {"reference": anchor}, observe,
                      facts=("params",), knobs=("reference",))
