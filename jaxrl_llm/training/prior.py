"""What is expected of a prompt before it is sampled: `extras["prior"]`, learned from the run's own rollouts."""
import functools

import jax
from jax import Array
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.control import prompt_average
from jaxrl_llm.control.prompt_average import PromptAverage
from jaxrl_llm.rollouts import Rollouts

# The second is a control: every prompt gets what is expected of its neighbour in the (shuffled) batch.
SOURCES = ("moving_average", "shuffled")


@functools.partial(jax.jit, static_argnums=0)
def predict(source: str, state: PromptAverage, prompt_ids_P: Array) -> Array:
    """f32[P]: the expected reward of these prompts, from one of `SOURCES`."""
    expected = prompt_average.predict(state, prompt_ids_P)
    return jax.numpy.roll(expected, 1) if source == "shuffled" else expected


@functools.partial(jax.jit, static_argnums=0)
def observe(mesh: Mesh, state: PromptAverage, prompt_ids_P: Array, rewards_PG: Array, valid_PG: Array) -> PromptAverage:
    """The state after these rewards, laid out as the one before."""
    rollouts = Rollouts(mask=valid_PG[..., None], valid=valid_PG, rewards=rewards_PG, prompt_ids=prompt_ids_P)
    new = prompt_average.observe(state, rollouts)
    return jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh))
