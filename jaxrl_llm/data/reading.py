"""Files of texts that others wrote as tokens: rows of supervised fine-tuning, or pairs of preferences."""
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.texts import Pair, Text
from jaxrl_llm.tasks import columns, tables
from jaxrl_llm.tasks.answered import reward_of, verdicts
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.texts import Entry, Plain, entry
from jaxrl_llm.tokenizers import turns as said
from jaxrl_llm.tokenizers.base import Tokenizer
from jaxrl_llm.tokenizers.messages import shown
from jaxrl_llm.tools.registry import function_of, one_of

TURNS, WRONG = ("all", "last"), ("keep", "drop")
COUNTED = ("rows", "examples", "divided", "too_long", "invalid", "no_answer", "contradicts")


class Given(NamedTuple):
    """`texts` of a file, or its `pairs`; one of the two is empty.

    `counts`, by name: `rows` read, `examples` made of them, `divided` rows whose turns are examples of their own, and rows that
    were left out: `too_long`, `invalid`. Of rows whose answers were compared, `no_answer` end without one and `contradicts`
    with another one.
    """

    texts: list[Text]
    pairs: list[Pair]
    counts: dict[str, int]


def read(path: str, tokenizer: Tokenizer, *, subset: str | None = None, data_dir: str | None = None, split: str = "train",
         prompt: str = "", response: str = "", chat: bool = True, turns: str = "all", longest: int = 0,
         limit: int | None = None, streaming: bool = False, invalid: str = "fail", reward: str = "", wrong: str = "keep"
         ) -> Given:
    """The texts, or the pairs, of a data set; forms of rows: see `tasks.texts`.

    Args:
      path: a data set as in `tasks.dataset`, or your own "module:function", which returns rows as dictionaries.
      prompt, response: templates over columns, for rows of other forms.
      chat: whether prompts and responses are messages, or plain texts with the end token of texts.
      turns: "all": every message of the assistant is learned; "last": the last one of each row.
      longest: rows with an example of more tokens are left out and counted, and never cut; 0: no limit.
      limit, streaming: see `tasks.dataset`.
      invalid: "fail": a malformed row is an error; "skip": it is left out, with a warning.
      reward: rewards such as "boxed", the first of which compares what the assistant says last with the column `answer`; empty:
        nothing is compared.
      wrong: "keep": rows without the right answer are learned too, and a warning has their share; "drop": they are left out.
    Raises ValueError with the file and line, or the row, for malformed rows; and if texts are mixed with pairs, or none is
    left.
    """
    for name, value, allowed in (("turns", turns, TURNS), ("invalid", invalid, ("fail", "skip")), ("wrong", wrong, WRONG)):
        one_of(name, value, allowed)
    table = _table(path, split, subset, data_dir, limit, streaming)
    known: list[_Known] = []
    counts: Counter[str] = Counter(rows=len(table.rows))
    refused = []
    for number, row in enumerate(table.rows):
        place = table.place(number)
        try:
            given = entry(row, prompt=prompt, response=response, chat=chat)
            problem = _problem(row, given, number) if reward else None
            made = examples(given, tokenizer, turns == "last", place)
        except ValueError as error:
            refused.append(f"{place}: {str(error).removeprefix(f'{place}: ')}")
            if invalid == "fail":
                raise ValueError(f"{refused[0]}. Correct the row, or leave such rows out: invalid=skip") from error
            continue
        if longest and max(len(one.ids) for found in made for one in (found if isinstance(found, Pair) else [found])) > longest:
            counts["too_long"] += 1
        else:
            counts["divided"] += len(made) > 1
            known.append(_Known(made, given, problem))
    counts["invalid"] = len(refused)
    known = _judged(known, reward, wrong, counts)
    _report(path, counts, refused, longest, wrong, len(known))
    learned = [one for row in known for one in row.made]
    texts = [one for one in learned if isinstance(one, Text)]
    pairs = [one for one in learned if isinstance(one, Pair)]
    if texts and pairs:
        raise ValueError(f"{path} has texts ({texts[0].place}) and pairs ({pairs[0].chosen.place}); give a file of either sort")
    counts["examples"] = len(learned)
    return Given(texts, pairs, {name: counts[name] for name in COUNTED})


class _Known(NamedTuple):
    """The examples of a row, what it has, and the problem that its answer makes."""

    made: Sequence[Text | Pair]
    given: Entry
    problem: Problem | None


def _problem(row: Mapping[str, Any], given: Entry, number: int) -> Problem:
    """The problem that the answer of a row makes; ValueError for a pair, and for a row without an answer."""
    if len(given.texts) > 1:
        raise ValueError("reward compares the answers of texts, and this row is a pair; leave reward empty")
    extra = {name: value for name, value in row.items() if value is not None}
    return Problem("", columns.answer(columns.at(row, "answer"), "answer"), number, extra=extra)


def _judged(known: list[_Known], reward: str, wrong: str, counts: Counter) -> list[_Known]:
    """The rows that are learned: all of them, or those with the right answer. Adds to the counts."""
    if not reward or not known:
        return known
    missing, other = verdicts(reward_of(reward), [_last_words(row.given.texts[0]) for row in known],
                              [row.problem for row in known if row.problem is not None])
    counts |= Counter(no_answer=int(missing.sum()), contradicts=int(other.sum()))
    return [row for row, bad in zip(known, missing | other) if wrong == "keep" or not bad]


def _last_words(text: Any) -> str:
    if isinstance(text, Plain):
        return text.reply
    return next(message["content"] for message in reversed(text.messages) if message["role"] == "assistant")


def examples(given: Entry, tokenizer: Tokenizer, last: bool, place: str = "") -> Sequence[Text | Pair]:
    """The texts of a row, more than one if the template changes earlier turns, or its pair.

    Raises ValueError for log-probs of another number of tokens, and for a pair whose texts are equal or no single texts.
    """
    variables = {} if given.tools is None else {"tools": given.tools}
    sides = [_of(text, tokenizer, last, len(given.texts) == 1, variables) for text in given.texts]
    if len(sides) == 1:
        return [_text(one, given, sides[0], place) for one in sides[0]]
    for name, side in zip(Pair._fields, sides):
        if len(side) > 1:
            raise ValueError(f"the turns of {name!r} are no single text, as the chat template changes earlier turns; set "
                             "turns=last, or give a template that keeps them")
    chosen, rejected = (_text(side[0], given, side, place) for side in sides)
    if chosen.prompt != rejected.prompt or (chosen.ids[:chosen.prompt] != rejected.ids[:chosen.prompt]).any():
        raise ValueError("'chosen' and 'rejected' have different prompts; give responses to one prompt")
    if np.array_equal(chosen.ids, rejected.ids):
        raise ValueError("'chosen' and 'rejected' are the same tokens, so neither can be preferred; remove the pair")
    return [Pair(chosen, rejected)]


def _of(text: Any, tokenizer: Tokenizer, last: bool, marks: bool, variables: Mapping[str, Any]) -> list[said.Example]:
    if isinstance(text, Plain):
        return [said.plain(tokenizer, text.prompt, text.reply)]
    if not tokenizer.chat_templates:
        raise ValueError("messages need a chat template, and this tokenizer has none; set config.model.chat_template to one, "
                         "or give prompts and responses as plain texts, with chat=False, in a run config.texts.options="
                         "'chat=False'")
    return said.conversations(tokenizer, text.messages, since=text.since, opened=text.opened, last=last, marks=marks,
                              **variables)


def _text(one: said.Example, given: Entry, side: Sequence[said.Example], place: str) -> Text:
    logprobs = None
    if given.logprobs is not None:
        count = sum(int(example.trained.sum()) for example in side)
        if len(given.logprobs) != count or len(side) > 1:
            raise ValueError(f"'logprobs' has {len(given.logprobs)} entries, and what is learned has {count} tokens with the "
                             f"ends of its turns, in {len(side)} texts; give an entry for each token of one text as this "
                             "tokenizer encodes it, or leave 'logprobs' out")
        logprobs = np.full(len(one.ids), np.nan, np.float32)
        logprobs[one.trained] = given.logprobs
    return Text(one.ids, one.trained, one.prompt, given.weight, given.writer, logprobs, place)


def _table(path: str, split: str, subset: str | None, data_dir: str | None, limit: int | None, streaming: bool) -> tables.Table:
    """The rows of a data set, or those that your own function returns."""
    module, _, function = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        return tables.read(path, split, subset=subset, data_dir=data_dir, limit=limit, streaming=streaming)
    rows = list(function_of("texts", path)())[:limit]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{path} returned {shown(rows)}; return a list of rows, each a dictionary")
    return tables.Table(rows, [], lambda i: f"{path}, row {i}")


def _report(path: str, counts: Mapping[str, int], refused: Sequence[str], longest: int, wrong: str, left: int) -> None:
    """Warns of rows that are left out or have no right answer; raises ValueError if none is left."""
    found = {"too_long": f"have more than {longest} tokens and are left out", "no_answer": "end without an answer",
             "contradicts": "end with another answer than theirs"}
    said = [f"{counts[name]} {words}" for name, words in found.items() if counts.get(name)]
    said += [f"{len(refused)} are malformed and left out, the first: {refused[0]}"] if refused else []
    if counts.get("no_answer") or counts.get("contradicts"):
        said.append(f"wrong={wrong} {'learns' if wrong == 'keep' else 'leaves out'} those without the right answer")
    if not left:
        raise ValueError(f"none of the {counts['rows']} rows of {path} can be learned from: {'; '.join(said)}. Raise the limit "
                         "of tokens, or correct the rows")
    if said:
        warnings.warn(f"of the {counts['rows']} rows of {path}, {'; '.join(said)}", RuntimeWarning, stacklevel=3)
