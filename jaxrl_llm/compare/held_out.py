"""Completions of held-out problems, drawn in rounds and kept line by line, so that a long measurement can be continued."""
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.training import rollout, setup
from jaxrl_llm.training.loop import held_out
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.progress import format_seconds
from jaxrl_llm.training.uids import Uids

Row = dict[str, Any]
FILE = "completions.jsonl"


def rows_of(sampled: rollout.Sampled, number: int, start: int) -> list[Row]:
    """One record per problem of a batch: what its completions earned, answered and how long they were."""
    P, G = sampled.rewards.shape
    lengths, names = sampled.completions.mask.sum(-1), sampled.scores.names
    components = sampled.scores.components.reshape(P, G, -1)
    rows = []
    for p, problem in enumerate(sampled.problems):
        answers = None if sampled.answers is None else sampled.answers[p * G:(p + 1) * G]
        rows.append({
            "round": number, "start": start, "problem": problem.id, "level": problem.level,
            "correct": (components[p, :, 0] > 0.5).astype(int).tolist(),
            "answers": None if answers is None else [None if answer is None else str(answer) for answer in answers],
            "lengths": lengths[p].tolist(), "stopped": sampled.completions.stopped[p].astype(int).tolist(),
            "components": {name: components[p, :, k].tolist() for k, name in enumerate(names)}})
    return rows


def draw(run: setup.Run, params, lora, *, problems: int, samples: int, temperature: float, key, until: int = 0,
         done: Sequence[Row] = (), keep: Callable[[list[Row]], None] = lambda rows: None,
         say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """At least `samples` completions for each of `problems` held-out problems, in rounds of a group each.

    Batches that `done` holds already are not drawn again, and left out where fewer are asked for; new ones are handed to `keep`
    one by one. A batch depends on the key, its round and its place alone, not on what was drawn before. At temperature 0 one
    completion says it all. With `until` a batch whose problems have all been solved that often is left alone, and `samples` is
    where the others are given up.

    Raises:
      ValueError: no held-out prompt fits.
    """
    c, rows = run.config, list(done)
    known, solved = {(row["round"], row["start"]) for row in rows}, Counter()
    for row in rows:
        solved[row["problem"]] += sum(row["correct"])
    chosen = held_out(run.task.heldout, problems)
    chosen = rollout.fitting_problems(chosen, run.tokenizer, run.prompt_tokens, c.prompts.overlong)
    if not chosen:
        raise ValueError(f"no held-out prompt fits in prompts.max_tokens={run.prompt_tokens}; raise it")
    rounds = 1 if temperature == 0 else -(-samples // c.sampling.group)
    generate, uids = run.sampler(params, lora, temperature), Uids().take(len(chosen), c.sampling.group)
    began = last = time.monotonic()
    for number in range(rounds):
        for start in range(0, len(chosen), c.prompts.per_step):
            finished = until and all(solved[problem.id] >= until for problem, _ in chosen[start:start + c.prompts.per_step])
            if (number, start) in known or finished:
                continue
            part = slice(start, start + c.prompts.per_step)
            sampled = rollout.sample(
                generate, chosen[part], jax.random.fold_in(key, number), uids[part], timer=PhaseTimer(),
                prompt_tokens=run.prompt_tokens, prompts=c.prompts.per_step, tokenizer=run.tokenizer, reward=run.reward,
                stop_strings=c.sampling.stop_strings)
            found = rows_of(sampled, number, start)
            if temperature == 0:
                found = [first_only(row) for row in found]
            keep(found)
            rows += found
            solved.update({row["problem"]: sum(row["correct"]) for row in found})
        now = time.monotonic()
        if now - last > 10:
            last = now
            left = (now - began) / (number + 1) * (rounds - number - 1)
            say(f"{(number + 1) * c.sampling.group} completions of each of {len(chosen)} problems, {format_seconds(left)} left")
    return [row for row in rows if row["round"] < rounds]


def first_only(row: Row) -> Row:
    """The record of a group of equal completions, as that of its first one."""
    cut = lambda value: value[:1] if isinstance(value, list) else value  # noqa: E731
    return {name: cut(value) for name, value in row.items()} | {"components": {n: cut(v) for n, v in row["components"].items()}}


def stored(file: Path, header: Row) -> list[Row]:
    """The records of whole batches in `file`, which belongs to `header`; both are written if the file is new.

    A batch that a kill cut short is dropped from the file. Raises ValueError when the file belongs to another measurement.
    """
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(header) + "\n")
        return []
    rows = list(read(file))
    if not rows or rows[0] != header:
        differ = ", ".join(k for k in header if not rows or rows[0].get(k) != header[k]) or "keys"
        raise ValueError(f"{file} holds another measurement (other {differ}); delete it or choose another --out")
    whole = [row for batch in rows[1:] for row in batch["rows"]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, file)
    return whole


def measured(folder: Path, task: str) -> dict[int, Row]:
    """The problems of a finished measurement of `task` in `folder`.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is one of another task, whose problems have the same numbers.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no measurement: {FILE} is missing; give the folder that evaluate.py wrote")
    header, *batches = read(file)
    if header["task"] != task:
        raise ValueError(f"{folder} measured the task {header['task']!r}, this is {task!r}; compare on the same task: --task")
    return by_problem([row for batch in batches for row in batch["rows"]])


def append(file: Path, rows: list[Row]) -> None:
    """Adds a batch as one line: it is there as a whole or not at all."""
    with open(file, "a") as out:
        out.write(json.dumps({"rows": rows}) + "\n")


def read(file: Path) -> Iterator[Row]:
    """The lines of `file` as JSON; a last one that was cut short is left out."""
    with open(file) as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def by_problem(rows: Sequence[Row]) -> dict[int, Row]:
    """The rounds of each problem joined, in the order of the problems' first appearance."""
    joined: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row["round"]):
        empty = {"level": row["level"], "correct": [], "answers": [], "lengths": [], "stopped": [],
                 "components": {name: [] for name in row["components"]}}
        whole = joined.setdefault(row["problem"], empty)
        for name in ("correct", "lengths", "stopped"):
            whole[name] += row[name]
        whole["answers"] = None if row["answers"] is None else whole["answers"] + row["answers"]
        for name, values in row["components"].items():
            whole["components"][name] += values
    return joined
