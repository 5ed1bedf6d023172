"""Literal texts, as rows of token ids, and the rollouts that they become."""
import numpy as np

from jaxrl_llm.data.forest import Forest, paths
from jaxrl_llm.data.text_forest import planted
from jaxrl_llm.data.texts import Text
from jaxrl_llm.tasks.base import Problem


def text(ids, trained, prompt, weight=1.0, **more):
    return Text(np.array(ids, np.int32), np.array(trained, bool), prompt, weight, **more)


TURNS = text([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1], 2, 0.5)  # two turns of the assistant, and what stands between them
SHORT = text([1, 9, 8], [0, 1, 1], 1, 2.0, logprobs=np.float32([np.nan, -0.5, -0.25]))
LONG = text([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [0] * 3 + [1] * 8 + [0], 3)
TEXTS = (TURNS, SHORT, LONG)
PAIRS = ((text([5, 6, 7, 8], [0, 0, 1, 1], 2), text([5, 6, 7, 9, 4], [0, 0, 1, 1, 1], 2)),
         (text([2, 3], [0, 1], 1), text([2, 4, 5, 6], [0, 1, 0, 1], 1)))


def forest(groups, **more) -> Forest:
    problems = [Problem(str(number), "", number) for number in range(len(groups))]
    return planted(problems, groups, lambda rows: [" ".join(map(str, row)) for row in rows], **more)


def rollouts(groups, **more):
    return paths(forest(groups), group=len(groups[0]), prompts=len(groups), version=0, tokens=lambda n: n,
                 prompt_tokens=lambda n: n).replace(**more)
