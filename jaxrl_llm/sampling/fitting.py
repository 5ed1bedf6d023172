"""Which problems are asked: those whose prompts fit, and a fair sample of held-out ones."""
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.engines.prompts import encode_problems, fit
from jaxrl_llm.tasks.base import Problem

Encode = Callable[[Sequence[Problem], Any], Sequence[list[int] | None]]


def fitting_problems(problems: Sequence[Problem], tokenizer, max_tokens: int, overlong: str, processes: int = 1,
                     encode: Encode = encode_problems):
    """The problems whose prompts fit and their token ids (see `engines.prompts.fit`).

    If several `processes` read problems in turns, each passes its own, and each gets those of all in order. `encode` turns
    problems into token ids, None for a problem that cannot be sampled.
    """
    mine = [(problem, None if ids is None else fit(ids, problem, max_tokens, overlong, tokenizer))
            for problem, ids in zip(problems, encode(problems, tokenizer), strict=True)]
    shares = parallel.gather_objects(mine)[:processes]  # several may read the same, and an environment may open it otherwise
    turns = itertools.zip_longest(*shares, fillvalue=(None, None))  # the first ones may have one more
    return [(problem, ids) for turn in turns for problem, ids in turn if ids is not None]


def held_out(source: Sequence[Problem], problems: int) -> list[Problem]:
    """`problems` of `source`, or all if there are fewer, drawn with a fixed seed, equally many of each of several tasks.

    What a task lacks comes from the others. Sources are often sorted, so that their first problems are not a fair sample.
    Every run is measured on the same problems.
    """
    sides, starts = getattr(source, "sides", (source,)), getattr(source, "starts", [0])  # of a mixture, see `tasks.mixture`
    rounds = sorted((i, k) for k, side in enumerate(sides) for i in range(min(len(side), problems)))
    counts = Counter(k for _, k in rounds[:problems])
    return [source[first + int(i)] for k, (first, side) in enumerate(zip(starts, sides))
            for i in np.random.default_rng(0).permutation(len(side))[:counts[k]]]
