"""Completions of held-out problems, drawn in repetitions and kept line by line, so that a long measurement can be continued."""
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl_llm.data.forest import Forest, policy_lengths
from jaxrl_llm.environments.runner import AllInvalid
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.runs.progress import format_seconds
from jaxrl_llm.runs.trained import Trained
from jaxrl_llm.sampling.fitting import fitting_problems, held_out
from jaxrl_llm.sampling.heldout import measuring
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.checkpoints import checksums
from jaxrl_llm.store.workdir import resolve_config
from jaxrl_llm.tools import files
from jaxrl_llm.topologies import groups

Row = dict[str, Any]
FILE = "completions.jsonl"
_SETTINGS = ("seed", "task", "environment", "rewards", "score", "model.dtype", "model.tokenizer")  # with prompts and sampling
_OF_A_POLICY = ("weights", "step", "seed", "problems", *(f"settings.{key}" for key in (
    "seed", "prompts.per_step", "sampling.group", "sampling.max_group", "sampling.max_draws", "sampling.paged_cache")))
_LEFT_OUT = ("sampling.temperature", "sampling.micro_batches", "sampling.engine")  # an entry of its own; they change no draw


def header_of(run: Trained, *, problems: int, temperature: float, seed: int) -> Row:
    """What the completions and scores of a measurement depend on, as JSON values; the first line of its file.

    `weights` and `chat_templates` are digests. No path of the run is among them: a run that moved continues its measurements.
    """
    flat = flatten_dict(resolve_config(run.config), sep=".")
    settings = {key: value for key, value in flat.items()
                if key in _SETTINGS or key.startswith(("prompts.", "sampling.")) and key not in _LEFT_OUT}
    templates = dict(run.source.stream.tokenizer.chat_templates)
    return {"task": run.config.environment or run.config.task, "step": run.step, "temperature": temperature, "seed": seed,
            "problems": problems, "weights": _digest(checksums({"params": run.params, "lora": run.lora})),
            "chat_templates": _digest(templates), "settings": settings}


def _digest(values: Row) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def rows_of(forest: Forest, number: int, start: int) -> list[Row]:
    """One record per problem of a batch: the rewards, answers and lengths of its completions.

    In an environment a completion is a trajectory and its length all that the policy wrote; lost trajectories are absent.
    """
    rows, ends, lengths = [], forest.ends, policy_lengths(forest)
    for p, problem in enumerate(forest.problems):
        mine = forest.prompt[ends] == p
        own = ends[mine]
        components, answers = forest.components[own], None if forest.answers is None else forest.answers[own]
        rows.append({
            "repetition": number, "start": start, "problem": problem.id, "level": problem.level,
            "correct": forest.solved[own].astype(int).tolist(),
            "answers": None if answers is None else [None if answer is None else str(answer) for answer in answers],
            "lengths": lengths[mine].tolist(), "stopped": forest.stopped[own].astype(int).tolist(),
            "components": {name: values.tolist() for name, values in zip(forest.names, components.T)
                           if not np.isnan(values).any()}})
    return rows


def draw(source: Source, params, lora, *, problems: int, samples: int, temperature: float, key, until: int = 0,
         done: Sequence[Row] = (), keep: Callable[[list[Row]], None] = lambda rows: None,
         say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """At least `samples` completions for each of `problems` held-out problems, in repetitions of a group each.

    Batches in `done` are not drawn again, and are ignored if fewer are requested; new ones are passed to `keep` one by one. A
    batch depends only on the key, its repetition and its place, not on what was drawn before. At temperature 0 one completion
    is enough. With `until`, a batch whose problems have all been solved that often is not continued, and `samples` is where
    the others are given up. What an environment loses is not drawn again: the problem has fewer completions, or none.

    Raises:
      ValueError: no held-out prompt fits.
      TooManyInvalid: the environment has lost more trajectories than `config.environment_invalid` allows.
    """
    stream, rows = source.held_out, without_repeats(done)
    known, solved = {(row["repetition"], row["start"]) for row in rows}, Counter()
    for row in rows:
        solved[row["problem"]] += sum(row["correct"])
    stream.forget()
    wanted = held_out(source.task.heldout, problems)
    chosen = fitting_problems(wanted, stream.tokenizer, stream.prompt_tokens, source.overlong, encode=stream.partner.encode)
    if not chosen:
        raise ValueError(f"no held-out prompt fits in prompts.max_tokens={stream.prompt_tokens}; raise it")
    if len(chosen) < len(wanted):
        say(f"{len(wanted) - len(chosen)} of {len(wanted)} held-out problems are left out: their prompts are too long, or the "
            "environment does not open them")
    repetitions = 1 if temperature == 0 else -(-samples // stream.group)
    began = last = time.monotonic()
    published = -1  # a measurement that is complete asks no server
    for number in range(repetitions):
        for start in range(0, len(chosen), stream.prompts):
            part = chosen[start:start + stream.prompts]
            finished = until and all(solved[problem.id] >= until for problem, _ in part)
            if (number, start) in known or finished:
                continue
            if published != number:
                stream.publish(Snapshot(-1, params, lora, jax.random.fold_in(key, number), measuring(temperature)))
                published = number
            new = rows_of(_grown(stream, part, number, start, problems), number, start)
            if temperature == 0:
                new = [first_only(row) for row in new]
            keep(new)
            rows += new
            solved.update({row["problem"]: sum(row["correct"]) for row in new})
        now = time.monotonic()
        if now - last > 10:
            last = now
            left = (now - began) / (number + 1) * (repetitions - number - 1)
            say(f"{(number + 1) * stream.group} completions of each of {len(chosen)} problems, {format_seconds(left)} left")
    stream.rest()
    return [row for row in without_repeats(rows) if row["repetition"] < repetitions]


def _grown(stream: Stream, part, number: int, start: int, problems: int) -> Forest:
    """The forest of a batch with a group for each of its problems, or with none if an environment has lost all of them.

    An environment draws by the uid alone, so each repetition has its own; single turns draw by the repetition's key as well.
    """
    planted = stream.partner.plant([problem for problem, _ in part], [ids for _, ids in part], draw=0)
    place = start + (number * problems if stream.partner.by_uid else 0)
    try:
        return stream.run(planted, groups(range(len(part)), stream.group), place * stream.group)
    except AllInvalid:
        return planted


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """The first record of each problem in each repetition: the same draw twice would count as two."""
    first: dict[tuple[int, int], Row] = {}
    for row in rows:
        first.setdefault((row["repetition"], row["problem"]), row)
    return list(first.values())


def first_only(row: Row) -> Row:
    """The record of a group of equal completions, reduced to the first one."""
    def cut(value):
        return value[:1] if isinstance(value, list) else value
    return {name: cut(value) for name, value in row.items()} | {"components": {n: cut(v) for n, v in row["components"].items()}}


def stored(file: Path, header: Row) -> list[Row]:
    """The records of whole batches in `file`, which belongs to `header`; both are written if the file is new.

    A batch truncated by a kill is dropped from the file. Raises ValueError when the file belongs to another measurement.
    """
    rows = list(read(file)) if file.is_file() else [header]
    if not rows or rows[0] != header:
        old, new = (flatten_dict(one, sep=".") for one in (rows[0] if rows else {}, header))
        differ = [key for key in {**new, **old} if old.get(key, ...) != new.get(key, ...)]
        raise ValueError(f"{file} holds another measurement (other {', '.join(differ[:6])}); delete it or choose another --out")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(temporary, file)
    return [row for batch in rows[1:] for row in batch["rows"]]


def measured(folder: Path, task: str) -> tuple[Row, dict[int, Row]]:
    """The header of a finished measurement of `task` in `folder`, and its problems.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the measurement is of another task, whose problems have the same numbers.
    """
    file = folder / FILE
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no measurement: {FILE} is missing; give the folder that evaluate.py wrote")
    header, *batches = read(file)
    if header["task"] != task:
        raise ValueError(f"{folder} measured the task {header['task']!r}, this is {task!r}; give the folder of a measurement "
                         "on the same task")
    return header, by_problem(without_repeats([row for batch in batches for row in batch["rows"]]))


def differing(ours: Row, theirs: Row) -> dict[str, tuple[Any, Any]]:
    """What two headers differ in and what a difference of policies does not explain: `{name: (ours, theirs)}`.

    Weights, seeds and the sizes of batches are left out. A key that one version did not have has its default.
    """
    default = flatten_dict({"settings": resolve_config(default_config())}, sep=".")
    one, other = ({**default, **flatten_dict(header, sep=".")} for header in (ours, theirs))
    return {name.removeprefix("settings."): (one.get(name), other.get(name)) for name in {**one, **other}
            if name not in _OF_A_POLICY and one.get(name) != other.get(name)}


def append(file: Path, rows: list[Row]) -> None:
    """Adds a batch as one line, atomically."""
    with open(file, "a") as out:
        out.write(json.dumps({"rows": rows}) + "\n")


def read(file: Path) -> Iterator[Row]:
    """The lines of `file` as JSON; a truncated last one is skipped."""
    for line in files.lines(file.parent, file.name):
        if line.endswith("\n"):
            yield json.loads(line)


def by_problem(rows: Sequence[Row], samples: int | None = None) -> dict[int, Row]:
    """The repetitions of each problem joined, in the order of the problems' first appearance; the first `samples`, or all.

    Problems without any completion are left out.
    """
    joined: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row["repetition"]):
        empty = {"level": row["level"], "correct": [], "answers": [], "lengths": [], "stopped": [],
                 "components": {name: [] for name in row["components"]}}
        whole = joined.setdefault(row["problem"], empty)
        for name in ("correct", "lengths", "stopped"):
            whole[name] = (whole[name] + row[name])[:samples]
        whole["answers"] = None if row["answers"] is None else (whole["answers"] + row["answers"])[:samples]
        for name, values in row["components"].items():
            whole["components"][name] = (whole["components"][name] + values)[:samples]
    return {problem: whole for problem, whole in joined.items() if whole["correct"]}
