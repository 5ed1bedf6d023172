"""Problems from data sets: Hugging Face `datasets`, TFDS and JSONL files, by one mapping of columns."""
import dataclasses
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.tasks import columns, tables
from jaxrl_llm.tasks.base import (
    Problem,
    ProblemSource,
    Task,
    disjoint_task,
    front_of,
    question_of,
    split_position,
    task,
    text_of,
)
from jaxrl_llm.tasks.texts import traces
from jaxrl_llm.tokenizers.messages import ending, present
from jaxrl_llm.tools.registry import one_of

HELD_OUT = 0.2  # held-out share of the problems if neither a split nor a file is held out


@dataclasses.dataclass(frozen=True)
class Mapping:
    """How a row becomes a problem; the attributes are the options of `dataset` with these names."""

    prompt: str
    answer: str
    extract: str
    tests: str
    level: str
    chat: bool

    def __post_init__(self):
        object.__setattr__(self, "_find", columns.extractor(self.extract))

    def check(self, table: tables.Table) -> None:
        """Raises ValueError for a column that is named here and that no row has."""
        wanted = [*columns.names_in(self.prompt), *([] if self.tests else [self.answer]), *filter(None, [self.tests])]
        wanted += [] if self.level == "level" else [self.level]
        for path in wanted if self.prompt else [path for path in wanted if path != "answer"]:
            columns.at(dict.fromkeys(table.columns), path if path in table.columns else path.split(".")[0])

    def problem(self, row: tables.Row) -> tuple[Problem, str]:
        """The problem of a row, and the text that its answer was taken from; ValueError if the row lacks something.

        A null says that the row lacks the column or key, but not in tests: a function may return null.
        """
        asked = self._asked(row)
        worked = columns.text(row[self.answer], self.answer) if self.tests and row.get(self.answer) is not None else ""
        answer: str | None = worked
        if not self.tests:
            if self.answer == "answer" not in row and not self.prompt:
                raise ValueError(f"{self.answer!r} is missing, got keys {sorted(row)}")
            worked = columns.answer(columns.at(row, self.answer), self.answer)
            answer = self._find(worked)  # type: ignore[attr-defined]
            if answer is None or columns.is_blank(answer):
                raise ValueError(f"extract={self.extract!r} finds no answer in column {self.answer!r}, {worked[-80:]!r}")
        used = {*columns.names_in(self.prompt), self.level, *(() if self.extract else (self.answer,))}
        used |= {"prompt", "messages"} if not self.prompt else set()
        extra = {name: value if name == "tests" else present(value) for name, value in row.items()
                 if name not in used and value is not None}
        if self.tests:
            extra["tests"] = columns.tests(columns.at(row, self.tests), self.tests, row)
        if extra.get("traces") is not None:
            extra["traces"] = traces(row["traces"], "traces")
        level = columns.at(row, self.level) if self.level in row or self.level != "level" else None
        return Problem(asked, answer or "", 0, "" if level is None else str(level), extra), worked

    def _asked(self, row: tables.Row) -> Any:
        """The prompt of a row: a text, or messages."""
        template = self.prompt
        if not template:
            held = [name for name in ("prompt", "messages") if row.get(name) is not None]
            if len(held) != 1:
                raise ValueError(f"expected exactly one of 'prompt' and 'messages', got keys {sorted(row)}; or say by prompt= "
                                 "which columns the prompt is made of, for example prompt='{question}'")
            template = f"{{{held[0]}}}"
        names = columns.names_in(template)
        value = columns.at(row, names[0]) if template == "{" + "".join(names) + "}" else columns.filled(template, row)
        if isinstance(value, list) or names == ["messages"] and not self.prompt:
            return columns.messages(value, names[0])
        if not isinstance(value, str) or not value:
            raise ValueError(f"{names[0] if names else 'prompt'!r} must be a non-empty string, got {value!r}")
        return ({"role": "user", "content": value},) if self.chat else value


@task
def dataset(*, path: str, subset: str | None = None, data_dir: str | None = None, split: str = "train",
            heldout: str | float | None = None, prompt: str = "", answer: str = "answer", extract: str = "", tests: str = "",
            level: str = "level", system: str = "", shots: int = 0, chat: bool = True, limit: int | None = None,
            streaming: bool = False, invalid: str = "fail") -> Task:
    r"""The task of a data set, with a part of it, or another split or file, held out.

    Args:
      path: name of a data set of the Hugging Face Hub, with its `subset`; a folder of one, also of `save_to_disk`; a file, or
        pattern of files, that ends in .jsonl, .json, .parquet, .arrow or .csv; or "tfds:BUILDER", prepared in `data_dir`.
      split: split to train on; empty: none, for evaluation sets.  heldout: another split or file, or a share of the
        problems, those whose prompt has the smallest hash; None: the split "test", or a fifth of a file.
      prompt: template over columns, see `columns`; a template of one column may hold chat messages. Empty: the column
        `prompt` or `messages`.  chat: whether text is the message of a user, or fed to the policy as it is.
      answer, extract: column of the answer, and how it is extracted from there, see `columns.extractor`.
      tests: column with tests of programs, see `columns.tests`; the reward is then `code`, and no answer is needed.
      level: column by which evaluations are grouped; `level` need not be there.
      system: a system message put first.  shots: number of examples before each prompt; they are the first training problems,
        which are then not trained on, with their answer column as it is.
      limit: number of rows that are read of each split, from the first on.  streaming: only these rows are downloaded.
      invalid: "fail": a row without prompt or answer, or a prompt on both sides, is an error; "skip": it is dropped from the
        training problems and counted in a warning. Prompts that differ in case and white space alone are one.

    Unused columns reach rewards as `problem.extra`. Raises ValueError for missing data, and for invalid rows, with file and
    line or row.
    """
    one_of("invalid", invalid, ("fail", "skip"))
    if streaming and limit is None:
        raise ValueError("streaming=True reads a data set row by row without an end; give limit, the number of rows to read")
    if not split and (shots or not isinstance(heldout, str)):
        raise ValueError(f"split='' has no training problems: heldout names the split or file that is measured, got "
                         f"{heldout!r}, and shots={shots} would be taken from them")
    if shots < 0 or (system and not chat):
        raise ValueError(f"shots={shots}, system={system!r}, chat={chat}; shots is at least 0, and a system message needs "
                         "chat=True")
    heldout = (HELD_OUT if tables.is_file(path) else "test") if heldout is None else heldout
    mapping = Mapping(prompt, answer, extract, tests, level, chat)

    def problems(where: str, part: str) -> list[tuple[Problem, str]]:
        table = tables.read(where, part, subset=subset, data_dir=data_dir, limit=limit, streaming=streaming)
        return _problems(mapping, table, invalid)

    train = problems(path, split) if split else []
    if not isinstance(heldout, str):
        train, rest = _split(train, heldout)
    else:
        rest = problems(heldout, "train") if tables.is_file(heldout) else problems(path, heldout)
        train = _without(train, rest, path, heldout, invalid)
    shown, train = train[:shots], train[shots:]

    def build(item: tuple[Problem, str], number: int) -> Problem:
        return dataclasses.replace(item[0], prompt=_in_front(item[0].prompt, system, shown), id=number)

    name, reward = f"dataset/{os.path.basename(path.rstrip('/'))}", "code" if tests else "boxed"
    return disjoint_task(name, train, rest, build, reward) if split else Task(name, (), ProblemSource(rest, build), reward)


@task
def jsonl(*, path: str, heldout_path: str | None = None, heldout_fraction: float = HELD_OUT) -> Task:
    """`dataset` of a JSONL file whose objects have `prompt` (fed to the policy as it is) or `messages` (chat), and `answer`."""
    return dataset(path=path, heldout=heldout_path or heldout_fraction, chat=False)


def _problems(mapping: Mapping, table: tables.Table, invalid: str) -> list[tuple[Problem, str]]:
    """The problems of a table with the texts of their answers; invalid rows fail, or are dropped with a warning."""
    mapping.check(table)
    problems, refused = [], []
    for i, row in enumerate(table.rows):
        try:
            problem, worked = mapping.problem(row)
            problems.append((dataclasses.replace(problem, place=table.place(i)), worked))
        except ValueError as error:
            refused.append(f"{table.place(i)}: {error}")
            if invalid == "fail":
                raise ValueError(f"{refused[0]}. Correct it, or leave such rows out: dataset(invalid=skip)") from error
    if refused:
        warnings.warn(f"{len(refused)} of {len(table.rows)} rows are left out, the first: {refused[0]}", RuntimeWarning,
                      stacklevel=3)
    _refuse_answered([problem for problem, _ in problems])
    return problems


def _refuse_answered(problems: Sequence[Problem]) -> None:
    """Raises ValueError for conversations for imitation: at least half of the open last messages have the answer in them.

    A policy would continue behind the answer that it is to give. Words that begin an answer, such as "Let me think.", stay.
    """
    opened = [(problem, problem.prompt[-1]["content"]) for problem in problems if not isinstance(problem.prompt, str)
              and problem.answer and ending(problem.prompt)["continue_final_message"]]
    answered = [(problem, words) for problem, words in opened
                if re.search(rf"(?<!\w){re.escape(problem.answer)}(?!\w)", words)]
    if answered and 2 * len(answered) >= len(opened):
        first, words = answered[0]
        raise ValueError(
            f"{first.place}: 'messages' end with the assistant's answer, {words[-80:]!r}, and so do {len(answered)} of the "
            f"{len(problems)} rows; a policy would continue behind the answer. Such rows are probably "
            "meant to be imitated: give the file as config.texts.path, with config.method=sft. Or take the last message away, "
            "and put it into 'solution' if it is to guide the policy")


def _split(rows: list[tuple[Problem, str]], share: float) -> tuple[list, list]:
    """The problems on either side of the hash of their prompts; a question that comes again stays on its first side."""
    sides: tuple[list, list] = ([], [])
    chosen: dict[str, bool] = {}
    for question, one in zip(_questions(rows), rows):
        sides[chosen.setdefault(question, split_position(text_of(one[0])) < share)].append(one)
    return sides


def _questions(rows: list[tuple[Problem, str]]) -> list[str]:
    front = front_of(problem for problem, _ in rows)
    return [question_of(problem, front) for problem, _ in rows]


def _without(train: list, heldout: list, path: str, other: str, invalid: str) -> list:
    """The training problems whose questions are not held out; dropping any is an error unless invalid ones are skipped."""
    asked = _questions(train)
    shared = {*_questions(heldout)} & {*asked}
    if shared and invalid == "fail":
        raise ValueError(f"{len(shared)} prompts are in both {path} and {other}, for example {min(shared)[:100]!r}; remove "
                         "them from one of the two, or set invalid=skip: then they are not trained on")
    if shared:
        warnings.warn(f"{len(shared)} prompts of {other} are in {path} too and are not trained on", RuntimeWarning,
                      stacklevel=3)
    return [one for question, one in zip(asked, train) if question not in shared]


def _in_front(prompt: Any, system: str, shown: Sequence[tuple[Problem, str]]) -> Any:
    """The prompt with a system message and worked examples before it."""
    if isinstance(prompt, str):
        return "".join(f"{example.prompt}{worked}\n\n" for example, worked in shown) + prompt
    if system and prompt[0]["role"] == "system":
        raise ValueError(f"the prompt has a system message of its own, {prompt[0]['content'][:80]!r}; leave system empty")
    turns = [turn for example, worked in shown for turn in (*example.prompt, {"role": "assistant", "content": worked})]
    return (*([{"role": "system", "content": system}] if system else []), *turns, *prompt)
