"""From problems to a padded batch of prompt tokens."""
import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.rollouts import PromptBatch
from jaxrl_llm.tasks.base import Messages, Problem
from jaxrl_llm.tasks.traces import Trace
from jaxrl_llm.tokenizers import turns
from jaxrl_llm.tokenizers.messages import ending

OVERLONG = ("fail", "skip", "truncate")


def encode_problem(problem: Problem, tokenizer) -> list[int]:
    """Token ids of one prompt: chat messages through the chat template, plain text as it is, with BOS if the model wants it.

    The policy continues a last message in the assistant's words. Raises ValueError naming the prompt when the template refuses
    it or the model does not embed one of its tokens.
    """
    try:
        if isinstance(problem.prompt, str):
            return tokenizer.encode(problem.prompt, add_bos=tokenizer.adds_bos)
        return tokenizer.encode_chat(problem.prompt, **ending(problem.prompt))
    except ValueError as error:
        raise ValueError(f"prompt {problem.id}: {error}") from error


def encode_problems(problems: Sequence[Problem], tokenizer) -> list[list[int]]:
    """`encode_problem` of each."""
    return [encode_problem(problem, tokenizer) for problem in problems]


class Spelled(NamedTuple):
    """A trace as tokens behind its prompt: `ids`, whether its writer `said` each, and not a tool, and `logprobs`, or NaN."""

    ids: list[int]
    said: list[bool]
    logprobs: list[float]


def spelled(trace: Trace, problem: Problem, tokenizer) -> Spelled:
    """The tokens of a trace behind the prompt of its problem: as the assistant's message of a prompt of messages, see `turns`.

    Raises ValueError for messages behind a prompt that is a text, and for log-probs of another number of tokens.
    """
    where = problem.place or f"problem {problem.id}"
    if isinstance(problem.prompt, str):
        if not isinstance(trace.words, str):
            raise ValueError(f"{where}: a trace of messages is behind a prompt without messages; give its 'text', or a prompt "
                             "of messages")
        ids = [*tokenizer.encode(trace.words), tokenizer.eos_id]
        said = [True] * len(ids)
    else:
        words = ({"role": "assistant", "content": trace.words},) if isinstance(trace.words, str) else trace.words
        example = turns.reply(tokenizer, problem.prompt, words)
        ids, said = (x[example.prompt:].tolist() for x in (example.ids, example.trained))
    known = np.full(len(ids), math.nan)
    if trace.logprobs is not None:
        if len(trace.logprobs) != sum(said):
            raise ValueError(f"{where}: a trace has {len(trace.logprobs)} log-probs, and {sum(said)} tokens with its end "
                             f"token; give one for each token that its writer says, or none: {str(trace.words)[:80]!r}")
        known[np.array(said)] = np.array(trace.logprobs, np.float64)  # null, where one is unknown, becomes NaN
    return Spelled(ids, said, known.tolist())


def solution_ids(problem: Problem, tokenizer) -> list[int]:
    """Token ids of `problem.extra["solution"]`, or of the answer alone, with the end token: what an expert would write."""
    return spelled(Trace(problem.extra.get("solution", problem.answer)), problem, tokenizer).ids


def fit(ids: list[int], problem: Problem, max_tokens: int, overlong: str, tokenizer) -> list[int] | None:
    """`ids` if they fit; else an error, None (`skip`), or those of a shorter prompt (`truncate`), see `truncated`."""
    if len(ids) <= max_tokens:
        return ids
    if overlong == "skip":
        return None
    if overlong == "truncate":
        return truncated(ids, problem, max_tokens, tokenizer)
    raise ValueError(f"prompt {problem.id} has {len(ids)} tokens, the limit is prompts.max_tokens={max_tokens}: "
                     f"{str(problem.prompt)[:120]!r}. Raise the limit, or set prompts.overlong to 'skip' or 'truncate'")


def truncated(ids: list[int], problem: Problem, max_tokens: int, tokenizer) -> list[int]:
    """The last of the `ids`, up to `max_tokens`, after BOS; of messages the ends of their words, with all of the markup.

    Where the chat template's markup alone has more tokens, and in environments, `ids` are cut as those of a text are.
    """
    if not isinstance(problem.prompt, str) and ids == encode_problem(problem, tokenizer):
        shorter = _shortened(ids, problem.prompt, max_tokens, tokenizer)
        if shorter is not None:
            return shorter
    first = ids[:1] if ids[0] == tokenizer.bos_id else []
    return first + ids[len(ids) - max_tokens + len(first):]


def _shortened(ids: list[int], messages: Messages, max_tokens: int, tokenizer) -> list[int] | None:
    """Ids of the messages with the last tokens of each content, equally many of all that are cut; None if none are left."""
    words = [tokenizer.encode(message["content"]) for message in messages]
    room = sum(map(len, words))  # for the words of all of them
    while len(ids) > max_tokens:
        room -= len(ids) - max_tokens
        counts = range(1, max(map(len, words)) + 1)
        most = bisect.bisect_right(counts, room, key=lambda count: sum(min(len(own), count) for own in words))
        if not most:
            return None
        ends = [tokenizer.decode(own[-most:], skip_special=False).lstrip("\ufffd") for own in words]
        contents = [end if len(own) > most else message["content"] for message, own, end in zip(messages, words, ends)]
        ids = tokenizer.encode_chat([{**message, "content": text} for message, text in zip(messages, contents)],
                                    **ending(messages))
    return ids


def longest(problems: Sequence[Problem], tokenizer, multiple: int = 8, encode=encode_problems) -> int:
    """Length in tokens of the longest of all prompts, rounded up to a multiple; `encode` makes token ids of problems.

    Every prompt is encoded (some 10,000 a second): a part of them, or a bound by characters, would be too short or too long.
    """
    length = max(len(ids or ()) for ids in encode([problems[i] for i in range(len(problems))], tokenizer))
    return -(-length // multiple) * multiple


def bound(problems: Sequence[Problem], tokenizer, multiple: int = 8, encode=encode_problems) -> int:
    """A length for prompts of which these are a sample: by as much above the longest as that is above the shortest."""
    lengths = [len(ids) for ids in encode(problems, tokenizer) if ids] or [1]
    return -(-(2 * max(lengths) - min(lengths)) // multiple) * multiple


def pad(rows: Sequence[list[int]], ids: Sequence[int], length: int) -> PromptBatch:
    """Rows of token ids as a right-padded `PromptBatch` on the host: `tokens i32[P, length]`, `mask bool[P, length]`."""
    tokens = np.zeros((len(rows), length), np.int32)
    mask = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        tokens[i, :len(row)] = row
        mask[i, :len(row)] = True
    return PromptBatch(tokens, mask, np.asarray(ids, np.int32))
