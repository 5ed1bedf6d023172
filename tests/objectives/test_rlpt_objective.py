"""RLPT's sum of two means: the worked example, and batches of one kind."""
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import from_lists

BATCH = from_lists([[1, 0], [1, 0]], old_logprobs=np.full((2, 2, 1), np.log(0.5), np.float32),
                   extras={"middle": np.array([0.0, 1.0], np.float32)})
NEW = jnp.log(jnp.array([[[0.5], [0.5]], [[0.6], [0.2]]]))


def loss_of(rollouts, new, **numbers):
    values, _ = advantages.make("grpo").update(rollouts, ())
    objective = objectives.make("rlpt", **numbers)
    return objective.update(new, rollouts, jnp.broadcast_to(jnp.reshape(values, (2, 2, -1)), new.shape), ())[0]


def test_worked_example():
    """Next: p = old, loss 0. Middle: ratios 1.2 and 0.4 (clipped to 0.8), -(0.8485 - 0.5657) / 2."""
    values, _ = advantages.make("grpo").update(BATCH, ())
    np.testing.assert_allclose(np.reshape(values, (2, 2)), [[0.707106, -0.707106]] * 2, atol=1e-6)
    np.testing.assert_allclose(loss_of(BATCH, NEW, middle_coef=0.5), -0.070711, atol=1e-6)
    np.testing.assert_allclose(loss_of(BATCH, NEW), -0.141421, atol=1e-6)
    np.testing.assert_allclose(loss_of(BATCH, NEW, middle_coef=0.0), 0, atol=1e-7)


def test_each_kind_is_a_mean_over_its_own_tokens():
    """Three times the tokens of next segments change nothing in the loss of the middle ones; one kind alone is `ppo_clip`."""
    longer = from_lists([[1, 0], [1, 0]], lengths=[[3, 3], [1, 1]], old_logprobs=jnp.full((2, 2, 3), jnp.log(0.5)),
                        extras=BATCH.extras)
    wide = jnp.pad(NEW, ((0, 0), (0, 0), (0, 2)), constant_values=jnp.log(0.5))
    np.testing.assert_allclose(loss_of(longer, wide), -0.141421, atol=1e-6)
    alone = BATCH.replace(extras={"middle": jnp.zeros(2)})
    values = jnp.reshape(advantages.make("grpo").update(alone, ())[0], (2, 2, 1))
    def slope(name):
        return jax.grad(lambda new: objectives.make(name).update(new, alone, values, ())[0])(NEW)
    np.testing.assert_allclose(slope("rlpt"), slope("ppo_clip"), rtol=1e-6)
