"""A predicted box against the target's (GUI-G1, arXiv 2505.15810).

Boxes are (x1, y1, x2, y2) and images (width, height), in pixels.
"""
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?")
HIT = 0.99  # above it the centre of the box is in the target


def find_box(completion: str) -> tuple[float, ...] | None:
    """(x1, y1, x2, y2), the last four numbers of a text; None where there are fewer, or they span no area."""
    numbers = tuple(map(float, _NUMBER.findall(completion)[-4:]))
    return numbers if len(numbers) == 4 and numbers[0] < numbers[2] and numbers[1] < numbers[3] else None


def box_reward(completions: Sequence[str], answers: Sequence[str], problems: Sequence) -> np.ndarray:
    """f32[N]: `hit + 0.25 IoU + 0.125 closeness`, see `grounding_reward`; 0 for texts without a box.

    `problem.extra["box"]` is the target (x1, y1, x2, y2), `problem.extra["image"]` (width, height), in pixels.
    """
    boxes = [find_box(text) for text in completions]
    predicted = np.array([box or (0, 0, 1, 1) for box in boxes], np.float32).reshape(-1, 1, 4)
    there = np.array([box is not None for box in boxes]).reshape(-1, 1)
    targets, images = (jnp.asarray([problem.extra[name] for problem in problems], jnp.float32).reshape(-1, width)
                       for name, width in (("box", 4), ("image", 2)))
    return np.asarray(grounding_reward(jnp.asarray(predicted), jnp.asarray(there), targets, images))[:, 0]


def box_iou(predicted: Array, target: Array) -> Array:
    """Intersection over union, [..., 4] -> [...]; an overlap of at most one pixel in width or height counts as none."""
    low = jnp.maximum(predicted[..., :2], target[..., :2])
    extent = jnp.minimum(predicted[..., 2:], target[..., 2:]) - low
    overlap = jnp.where(jnp.all(extent > 1, axis=-1), jnp.prod(extent, axis=-1), 0)
    union = _area(predicted) + _area(target) - overlap
    return jnp.where(union > 0, overlap / jnp.where(union > 0, union, 1), 0)


def grounding_reward(predicted_PG4: Array, parsed_PG: Array, targets_P4: Array, images_P2: Array, *, alpha: float = 0.25,
                     beta: float = 0.125) -> Array:
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


def _area(box: Array) -> Array:
    return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])
