"""Conversations that others wrote, as token ids and masks of what the assistant says in them.

This is the one place where given texts become ids. The assistant's message is what the chat template writes behind the prompt,
with the template's own end of turn, so a text has the tokens that the policy would have sampled.

A conversation is rendered turn by turn. Each rendering must begin with the one before: the prompt of a turn with the rendering
of the last turn, and the turn with its prompt. Where a template changes earlier turns (many drop earlier thoughts), the later
turns are examples of their own, each behind the prompt under which the policy would have sampled it.
"""
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.tokenizers.base import Tokenizer
from jaxrl_llm.tokenizers.chat import generation_marks
from jaxrl_llm.tokenizers.conversation import guarded
from jaxrl_llm.tokenizers.messages import Messages, ending, shown


class Example(NamedTuple):
    """`ids` i32[N] of a conversation, those `trained` bool[N], the last of which is, and the length of the `prompt`.

    `turns` are the numbers of the messages that are trained.
    """

    ids: np.ndarray
    trained: np.ndarray
    prompt: int
    turns: tuple[int, ...]


class _Turn(NamedTuple):
    """The text under which message `number` is said, and the text with it."""

    number: int
    before: str
    after: str


def plain(tokenizer: Tokenizer, prompt: str, reply: str) -> Example:
    """A text without messages: the prompt, and a reply with the end token of texts, as a policy reads and writes them.

    Without a prompt the whole text is trained, but for its first token, which nothing predicts.
    """
    first = tokenizer.encode(prompt, add_bos=tokenizer.adds_bos) if prompt or tokenizer.adds_bos else []
    ids = np.array([*first, *tokenizer.encode(reply), tokenizer.eos_id], np.int32)
    count = max(len(first), 1)
    return Example(ids, np.arange(len(ids)) >= count, count, (0,))


def conversations(tokenizer: Tokenizer, messages: Messages, *, since: int = 0, opened: str = "", last: bool = False,
                  marks: bool = False, **variables) -> list[Example]:
    """The examples of a conversation: one, or several if the template changes earlier turns.

    Args:
      messages: the conversation. What follows the last message of the assistant is left out.
      since: the number of the first message that may be trained.
      opened: words of that message that belong to its prompt.
      last: only the last message of the assistant is trained.
      marks: the parts that the template marks by {% generation %} are trained instead, if it has such marks.
      variables: of the chat template, such as `tools`.
    Raises ValueError without a message of the assistant, and for a template that renders no turn behind its prompt.
    """
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= since]
    if not said:
        raise ValueError("no message of the assistant is left to learn from; add one with the role 'assistant', or remove the "
                         "conversation")
    messages, variables, cut = guarded(tokenizer, messages, variables)
    turns = [_turn(tokenizer, messages, number, variables, opened if number == since else "")
             for number in (said[-1:] if last else said)]
    marked = generation_marks(tokenizer.chat_templates, messages, variables) if marks else None
    spans = None if marked is None else functools.partial(_marked, tokenizer, messages, variables, marked)
    return [_example(tokenizer, run, cut, spans) for run in _runs(turns)]


def reply(tokenizer: Tokenizer, prompt: Messages, words: Messages, *, last: bool = False, **variables) -> Example:
    """A prompt of messages, and behind it words of the assistant, and of tools between them.

    If the prompt ends with words of the assistant, which the policy continues, the first words continue them. Raises ValueError
    as `conversations` does, and for a template that changes earlier turns while tools answer.
    """
    whole, first, opened = joined(prompt, words)
    found = conversations(tokenizer, whole, since=first, opened=opened, last=last, **variables)
    if len(found) > 1:
        raise ValueError(f"the chat template changes message {found[0].turns[-1]} once message {found[1].turns[0]} is said, so "
                         f"these are no single text behind the prompt. {_ADVICE}")
    return found[0]


def joined(prompt: Messages, words: Messages) -> tuple[list[Mapping[str, Any]], int, str]:
    """A prompt and the words behind it as one conversation, the number of the first message with words, and words before them.

    The words before them are those of an open last message of the prompt, which the policy continues.
    """
    opened = prompt[-1]["content"] if ending(prompt)["continue_final_message"] else ""
    first = len(prompt) - bool(opened)
    return [*prompt[:first], {**words[0], "content": opened + words[0]["content"]}, *words[1:]], first, opened


_ADVICE = ("Give a template that keeps what it has written (config.model.chat_template), or set its variables "
           "(config.model.chat_template_kwargs)")


def _turn(tokenizer: Tokenizer, messages: Messages, number: int, variables: Mapping[str, Any], opened: str = "") -> _Turn:
    """The two renderings of a turn; with `opened`, words of its message that the prompt has already."""
    if opened:
        begun = [*messages[:number], {"role": "assistant", "content": opened}]
        before = tokenizer.render_chat(begun, add_generation_prompt=False, continue_final_message=True, **variables)
    else:
        before = tokenizer.render_chat(messages[:number], **variables)
    after = tokenizer.render_chat(messages[:number + 1], add_generation_prompt=False, **variables)
    if not after.startswith(before):
        raise ValueError(f"the chat template writes message {number} otherwise than behind its prompt, so the policy never "
                         f"says it like this: {_differing(before, after)}. {_ADVICE}")
    if len(after) == len(before):
        raise ValueError(f"the chat template leaves out message {number} of the assistant, {shown(messages[number])}; remove "
                         "it, or give a template that writes it")
    return _Turn(number, before, after)


def _differing(first: str, second: str) -> str:
    """Where two texts begin to differ, in words."""
    place = len(os.path.commonprefix([first, second]))
    return (f"behind {first[max(place - 40, 0):place]!r} the rendering before has {first[place:place + 40]!r}, and the longer "
            f"one has {second[place:place + 40]!r}")


def _runs(turns: Sequence[_Turn]) -> list[list[_Turn]]:
    """The turns in runs, in which the prompt of each begins with the rendering of the turn before."""
    runs = [[turns[0]]]
    for before, turn in itertools.pairwise(turns):
        if turn.before.startswith(before.after):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return runs


def _example(tokenizer: Tokenizer, run: Sequence[_Turn], cut: str, spans: Callable | None) -> Example:
    """The ids and the mask of a run of turns."""
    text = run[-1].after
    places = [place for turn in run for place in (len(turn.before), len(turn.after))] if spans is None else spans(run)
    parts = _pieces(tokenizer, text, [0, *places, len(text)], cut)
    ids: list[int] = []
    trained: list[bool] = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            count = 0
        elif spans is not None:
            count = len(part)
        else:
            part, count = _ended(tokenizer, part)
        ids += part
        trained += [True] * count + [False] * (len(part) - count)
    mask = np.array(trained)
    mask[0] = False  # nothing predicts the first token
    if not mask.any():
        raise ValueError(f"the chat template marks nothing of message {run[-1].number} of the assistant as what it generates; "
                         "enclose what it says, with the end of its turn, in {% generation %} and {% endgeneration %}")
    end = len(mask) - int(mask[::-1].argmax())
    return Example(np.array(ids[:end], np.int32), mask[:end], int(mask.argmax()), tuple(turn.number for turn in run))


def _ended(tokenizer: Tokenizer, part: list[int]) -> tuple[list[int], int]:
    """The ids of a turn, and how many of them the policy samples: those up to its end of turn.

    If the template writes none, the turn ends with the token by which the policy ends texts.
    """
    ends = [place for place, token in enumerate(part) if token in tokenizer.stop_ids]
    return (part, ends[-1] + 1) if ends else ([*part, tokenizer.eos_id], len(part) + 1)


def _pieces(tokenizer: Tokenizer, text: str, places: Sequence[int], cut: str) -> list[list[int]]:
    """Ids of the pieces of a text between the places.

    They are those of the whole text. Where a token reaches over a place, it is divided, as it is for the policy, which reads
    its prompt before it says anything.
    """
    def encode(words: str) -> list[int]:
        return [token for piece in (words.split(cut) if cut else [words]) if piece for token in tokenizer.encode(piece)]

    bounds = list(itertools.pairwise(places))
    apart = [encode(text[begin:end]) for begin, end in bounds]
    if list(itertools.chain(*apart)) == encode(text):
        return apart
    known: list[int] = []
    parts = []
    for (_, end), alone in zip(bounds, apart):
        longer = encode(text[:end])
        parts.append(longer[len(known):] if longer[:len(known)] == known else alone)
        known = known + parts[-1]
    return parts


def _marked(tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, Any], marks: Mapping[str, str],
            run: Sequence[_Turn]) -> list[int]:
    """Where the marked parts of a run begin and end; those of turns before the run are not trained."""
    enclosed: dict[str, Any] = {**variables, **marks}
    written = tokenizer.render_chat(messages[:run[-1].number + 1], add_generation_prompt=False, **enclosed)
    opening, closing = marks.values()
    places: list[int] = []
    text = ""
    for part in written.split(opening):
        inside, closed, rest = part.partition(closing)
        if closed and len(text) + len(inside) > len(run[0].before):
            places += [len(text), len(text) + len(inside)]
        text += inside + rest
    if text != run[-1].after:
        raise ValueError(f"the chat template writes other text where its {{% generation %}} parts are marked: "
                         f"{_differing(run[-1].after, text)}. {_ADVICE}")
    return places
