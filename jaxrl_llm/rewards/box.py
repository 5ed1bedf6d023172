"""A predicted box against the target's (GUI-G1, arXiv 2505.15810)."""
import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.gui_g1_weights import grounding_reward

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
