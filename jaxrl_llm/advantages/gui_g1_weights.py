"""GUI-G1: more weight for small targets (arXiv 2505.15810), see `rewards.box` for the reward.

Boxes are (x1, y1, x2, y2) and images (width, height), in pixels.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


def size_weights(targets_N4: Array, images_N2: Array) -> Array:
    """f32[N] in [0.5, 1.5]: `0.5 + (inv - min) / (max - min)`, `inv = image area / box area`, over the whole data set.

    Compute it once from all N examples. If all targets have one size, the weights are 1 (our choice).
    """
    inverse = jnp.prod(images_N2, axis=-1) / jnp.prod(targets_N4[..., 2:] - targets_N4[..., :2], axis=-1)
    span = jnp.max(inverse) - jnp.min(inverse)
    return jnp.where(span > 0, 0.5 + (inverse - jnp.min(inverse)) / jnp.where(span > 0, span, 1), 1)


@estimator
def gui_g1_weights() -> Estimator:
    """`A_i = w (r_i - group mean)`, w = `extras["target_weights"]` f32[P] from `size_weights`.

    There is no division by the deviation, which would favour prompts of extreme difficulty. A clipped surrogate is
    proportional to A, so w weights the loss; the paper divides it by a constant length, `aggregation="fixed_length"`.
    """

    def advantages(rollouts):
        centred = rollouts.rewards - masked.group_mean(rollouts.rewards, rollouts.valid)
        return rollouts.extras["target_weights"][:, None] * centred

    return stateless(advantages, needs=("rewards", "target_weights"))
