"""A seed for each position of a text, for objectives that draw something there, see `objectives.base.Objective.position`."""
import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import SEEDS, Rollouts
from jaxrl_llm.recorders.base import Context, Recorder, recorder


@recorder("token_seeds", provides=(SEEDS,))
def of_run(context: Context) -> Recorder:
    """`token_seeds` u32[P, G, T], by the run's seed, the version that learns, the problem, its rollout and the position alone.

    They do not depend on padding or on other rollouts. In packed rows tokens that rollouts of a prompt share have one seed.
    """
    seed = int(context.config.seed)
    return Recorder("token_seeds", (SEEDS,), lambda own, params, lora, rollouts: {SEEDS: token_seeds(seed, rollouts)})


@functools.partial(jax.jit, static_argnums=0)
def token_seeds(seed: int, rollouts: Rollouts) -> jax.Array:
    """u32[P, G, T], see `of_run`."""
    _, G, T = rollouts.mask.shape

    def of_prompt(version, number):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), version), number)
        of_rollouts = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(G))
        keys = jax.vmap(lambda own: jax.vmap(functools.partial(jax.random.fold_in, own))(jnp.arange(T)))(of_rollouts)
        return jax.vmap(jax.vmap(jax.random.bits))(keys)

    return jax.vmap(of_prompt)(rollouts.extras["current_version"], rollouts.prompt_ids)
