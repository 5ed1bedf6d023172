"""What rewards read of a problem: its answer as a number, or keys of `Problem.extra`. A run checks all rows at its start."""
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.text import reference_number


def number(verifier: str) -> Callable[[Any], object]:
    """A check that the answer is a number."""
    return lambda problem: reference_number(problem.answer, verifier)


def target_box(problem: Any) -> None:
    """Raises ValueError unless `box` is (x1, y1, x2, y2) that spans an area, and `image` (width, height)."""
    box, image = problem.extra.get("box"), problem.extra.get("image")
    if not _numbers(box, 4) or not _numbers(image, 2) or not (box[0] < box[2] and box[1] < box[3] and min(image) > 0):
        raise ValueError("the box reward needs problem.extra['box'], four numbers x1, y1, x2, y2 with x1 < x2 and y1 < y2, and "
                         f"problem.extra['image'], a width and a height, got {str(box)[:80]} and {str(image)[:80]}")


def _numbers(value: Any, count: int) -> bool:
    return isinstance(value, Sequence) and len(value) == count and all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in value)


def answer_texts(problem: Any) -> None:
    """Raises ValueError unless `answers`, if there are any, are texts."""
    answers = problem.extra.get("answers", ())
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"the token_f1 reward reads problem.extra['answers'], a list of texts, got {str(answers)[:80]!r}")


def gym(problem: Any) -> None:
    """Raises ValueError unless a problem names its scorer."""
    if problem is None or "gym" not in problem.extra:
        raise ValueError("the reasoning_gym reward needs problems of the reasoning_gym task: they name the scorer")


def repositories(problem: Any) -> None:
    """Raises ValueError unless `files` and `new_files` are contents by path."""
    extra = {} if problem is None else problem.extra
    if not all(isinstance(extra.get(name), Mapping) and all(isinstance(content, str) for content in extra[name].values())
               for name in ("files", "new_files")):
        raise ValueError("the swe_rl reward needs problem.extra['files'] and problem.extra['new_files'], contents by path, "
                         "as the task edits has them")
