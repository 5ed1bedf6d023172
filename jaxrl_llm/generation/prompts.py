"""From problems to a padded batch of prompt tokens."""
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.rollouts import Prompts
from jaxrl_llm.tasks.base import Problem

OVERLONG = ("fail", "skip", "truncate")


def encode_problem(problem: Problem, tokenizer) -> list[int]:
    """Token ids of one prompt: chat messages through the chat template, plain text as it is, with BOS if the model wants it.

    Raises ValueError naming the prompt when the template refuses it or the model does not embed one of its tokens.
    """
    try:
        if isinstance(problem.prompt, str):
            return tokenizer.encode(problem.prompt, add_bos=tokenizer.adds_bos)
        return tokenizer.encode_chat(problem.prompt)
    except ValueError as error:
        raise ValueError(f"prompt {problem.id}: {error}") from error


def encode_problems(problems: Sequence[Problem], tokenizer) -> list[list[int]]:
    """`encode_problem` of each."""
    return [encode_problem(problem, tokenizer) for problem in problems]


def solution_ids(problem: Problem, tokenizer) -> list[int]:
    """Token ids of `problem.extra["solution"]`, or of the answer alone, with the end token: what an expert would write."""
    return [*tokenizer.encode(problem.extra.get("solution", problem.answer)), tokenizer.eos_id]


def fit(ids: list[int], problem: Problem, max_tokens: int, overlong: str) -> list[int] | None:
    """`ids` if they fit; else an error, None (`skip`), or the last `max_tokens` of them (`truncate`)."""
    if len(ids) <= max_tokens:
        return ids
    if overlong == "skip":
        return None
    if overlong == "truncate":
        return ids[-max_tokens:]
    raise ValueError(f"prompt {problem.id} has {len(ids)} tokens, the limit is prompts.max_tokens={max_tokens}: "
                     f"{str(problem.prompt)[:120]!r}. Raise the limit, or set prompts.overlong to 'skip' or 'truncate'")


def longest(problems: Sequence[Problem], tokenizer, multiple: int = 8, encode=encode_problems) -> int:
    """Length in tokens of the longest of all prompts, rounded up to a multiple; `encode` makes token ids of problems.

    Every prompt is encoded (some 10,000 a second): a part of them, or a bound by characters, would be too short or too long.
    """
    length = max(len(ids or ()) for ids in encode([problems[i] for i in range(len(problems))], tokenizer))
    return -(-length // multiple) * multiple


def pad(rows: Sequence[list[int]], ids: Sequence[int], length: int) -> Prompts:
    """Rows of token ids as a right-padded `Prompts` batch on the host: `tokens i32[P, length]`, `mask bool[P, length]`."""
    tokens = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, :len(row)] = row
        mask[i, :len(row)] = True
    return Prompts(tokens, mask, np.asarray(ids, np.int32))
