"""GUI-G1: rewards of a predicted box, and more weight for small targets (arXiv 2505.15810).

Boxes are (x1, y1, x2, y2) and images (width, height), in pixels.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked
from jaxrl_llm.advantages.base import Estimator, estimator, stateless


def _area(box: Array) -> Array:
    return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])


def size_weights(targets_N4: Array, images_N2: Array) -> Array:
    """f32[N] in [0.5, 1.5]: `0.5 + (inv - min) / (max - min)`, `inv = image area / box area`, over the whole data set.

    Compute it once from all N examples. If all targets have one size, the weights are 1 (our choice).
    """
    inverse = jnp.prod(images_N2, axis=-1) / _area(targets_N4)
    span = jnp.max(inverse) - jnp.min(inverse)
    return jnp.where(span > 0, 0.5 + (inverse - jnp.min(inverse)) / jnp.where(span > 0, span, 1), 1)


def box_iou(predicted: Array, target: Array) -> Array:
    """Intersection over union, [..., 4] -> [...]; an overlap of at most one pixel in width or height counts as none."""
    low = jnp.maximum(predicted[..., :2], target[..., :2])
    extent = jnp.minimum(predicted[..., 2:], target[..., 2:]) - low
    overlap = jnp.where(jnp.all(extent > 1, axis=-1), jnp.prod(extent, axis=-1), 0)
    union = _area(predicted) + _area(target) - overlap
    return jnp.where(union > 0, overlap / jnp.where(union > 0, union, 1), 0)


def grounding_reward(
    predicted_PG4: Array,
    parsed_PG: Array,
    targets_P4: Array,
    images_P2: Array,
    *,
    alpha: float = 0.25,
    beta: float = 0.125,
) -> Array:
    """f32[P, G]: `hit + alpha * IoU + beta * closeness`, 0 where the answer has no box (`parsed` False).

    hit: the centre of the predicted box is inside the target, bounds included. closeness: harmonic mean over the
    four coordinates of 1 - |difference| / (width or height), 0 when one of them is 0 or less.
    """
    target, image = targets_P4[:, None], images_P2[:, None]
    target = jnp.broadcast_to(target, predicted_PG4.shape)
    centre = (predicted_PG4[..., :2] + predicted_PG4[..., 2:]) / 2
    hit = jnp.all((centre >= target[..., :2]) & (centre <= target[..., 2:]), axis=-1)
    close = 1 - jnp.abs(predicted_PG4 - target) / jnp.concatenate([image, image], axis=-1)
    some = jnp.all(close > 0, axis=-1)
    closeness = jnp.where(some, 4 / jnp.sum(1 / jnp.where(some[..., None], close, 1), axis=-1), 0)
    return jnp.where(parsed_PG, hit + alpha * box_iou(predicted_PG4, target) + beta * closeness, 0)


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
