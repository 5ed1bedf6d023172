"""The load-balancing loss of a mixture of experts (arXiv 2101.03961, equations 4 to 6), over a whole mini-batch."""
import jax
import jax.numpy as jnp

from jaxrl_llm.models.moe import Loads


def loss(loads: Loads, chosen: jax.Array, per_token: int) -> jax.Array:
    """`mean over layers of E sum_e f_e p_e`; f32[]: k if all experts get equally many tokens, else more.

    f_e is the share of tokens that chose expert e, p_e the mean of the router's probabilities for it. The shares have no
    gradient. They are computed over the whole mini-batch, so that losses of its micro-batches add up to its own; shares of
    each micro-batch would demand balance within every few sequences (arXiv 2501.11873).

    Args:
      loads: `f32[P, L, E]`, of a (micro-)batch.
      chosen: `f32[L, E]`, tokens that chose each expert in the whole mini-batch.
      per_token: k, experts of a token.
    """
    tokens = jnp.maximum(chosen.sum(-1, keepdims=True) / per_token, 1)
    per_layer = (chosen / tokens * loads.probs.sum(0) / tokens).sum(-1)
    return chosen.shape[-1] * per_layer.mean()


def max_load(chosen: jax.Array) -> jax.Array:
    """The load of the busiest expert of any layer, divided by the balanced load: 1 to E / k, from tokens `[L, E]`."""
    return (chosen / jnp.maximum(chosen.mean(-1, keepdims=True), 1e-9)).max()
