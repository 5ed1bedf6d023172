"""Boxes of named elements on screens that are described in text: grounding without images."""
import random

import numpy as np

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, split_position, task

NAMES = ("ok", "cancel", "save", "open", "close", "search", "menu", "help", "back", "next", "send", "home")


@task
def grounding(*, width: int = 100, height: int = 100, elements: int = 3, size: int = 2000, heldout_fraction: float = 0.2,
              seed: int = 0) -> Task:
    """Screens as lines `name x1 y1 x2 y2`, in pixels, and the name of an element, whose box is asked for.

    Problems have `extra["box"]` and `extra["image"]`, which the reward `box` reads, and the fact `target_weights`, in
    [0.5, 1.5], larger for smaller boxes: `0.5 + (inv - min inv) / (max inv - min inv)`, inv = screen area / box area, over all
    problems (GUI-G1, arXiv 2505.15810). Raises ValueError for screens below 20 pixels or more `elements` than names.
    """
    if min(width, height) < 20 or not 1 <= elements <= len(NAMES):
        raise ValueError(f"width={width}, height={height}, elements={elements}; allowed are screens from 20 pixels on and 1 to "
                         f"{len(NAMES)} elements")
    chance = random.Random(f"{seed} {width} {height} {elements}")
    screens = [_screen(chance, width, height, elements) for _ in range(size)]
    boxes = np.array([boxes[asked] for boxes, asked in screens])
    inverse = width * height / ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))
    span = inverse.max() - inverse.min()
    weights = 0.5 + (inverse - inverse.min()) / span if span > 0 else np.ones(size)

    def build(number_of_screen: int, number: int) -> Problem:
        listed, asked = screens[number_of_screen]
        lines = "".join(f"{name} {' '.join(map(str, box))}\n" for name, box in listed.items())
        return Problem(f"{lines}{asked}=", " ".join(map(str, listed[asked])), number, extra={
            "box": listed[asked], "image": (width, height), "target_weights": float(weights[number_of_screen])})

    sides: tuple[list[int], list[int]] = ([], [])
    for place, (listed, asked) in enumerate(screens):
        sides[split_position(f"{asked} {sorted(listed.items())}") < heldout_fraction].append(place)
    made = disjoint_task("grounding", *sides, build, reward="box")
    return Task(made.name, made.train, made.heldout, made.reward, facts=("target_weights",))


def _screen(chance: random.Random, width: int, height: int, elements: int) -> tuple[dict[str, tuple[int, ...]], str]:
    """Boxes (x1, y1, x2, y2) by name, and the name that is asked for."""
    boxes: dict[str, tuple[int, ...]] = {}
    for name in chance.sample(NAMES, elements):
        wide, high = chance.randint(4, width // 2), chance.randint(4, height // 2)
        x, y = chance.randint(0, width - 1 - wide), chance.randint(0, height - 1 - high)
        boxes[name] = (x, y, x + wide, y + high)
    return boxes, chance.choice(list(boxes))
