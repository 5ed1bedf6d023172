"""The buffer of a replay: a forest of stored groups on the host, from the oldest to the newest.

The buffer is never changed in place: the buffer of an earlier step stays unchanged. Stored rollouts keep their uids, the
sampler's log-probs, the version of the weights that sampled them, and what an environment reported of their turns. Under rules
with priorities, stored groups have the fact `priority`, and groups of a batch the fact `replay_weight`.
"""
import base64
import dataclasses
import io
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.replay.base import Replay
from jaxrl_llm.tasks.base import Problem

_FACT = "fact_"  # prefix of the names of facts in an archive


class ReplayedBatch(NamedTuple):
    """A batch of sampled and stored rollouts, the buffer after it, and `metrics`."""

    forest: Forest
    buffer: Forest
    metrics: dict[str, float]


class Rehearsal(NamedTuple):
    """Batches of stored groups for the updates of a step, the buffer after them, and `metrics`."""

    batches: tuple[Forest, ...]
    buffer: Forest
    metrics: dict[str, float]


def take(replay: Replay, buffer: Forest, version: int, prompts: int, rng: np.random.Generator) -> tuple[Forest, Forest]:
    """`(stored groups for a batch of `prompts` prompts, buffer)`; at least one prompt of the batch is sampled."""
    stored = _select(replay, buffer, _chosen(replay, buffer, version, prompts, rng)[:prompts - 1])
    return stored, _after(replay, buffer, bool(stored.problems))


def draw(replay: Replay, fresh: Forest, buffer: Forest, version: int, prompts: int, group: int, rng: np.random.Generator
         ) -> Rehearsal:
    """The fresh rollouts are stored, then groups are drawn `replay.updates` times, in batches of at most `prompts` groups."""
    buffer = store(replay, fresh, buffer, group, version)
    batches, size = list[Forest](), len(buffer.ends)
    for _ in range(replay.updates):
        chosen = _chosen(replay, buffer, version, prompts, rng)
        batches += [_select(replay, buffer, chosen[i:i + prompts]) for i in range(0, len(chosen), prompts)]
    ages = [version - forests.versions(one) for one in batches]
    old = sum(map(len, ages))
    metrics = {"replay/size": float(size), "replay/share": old / max(old + len(fresh.ends), 1)}
    metrics |= {"replay/age": float(np.concatenate(ages).mean())} if old else {}
    return Rehearsal(tuple(batches), _after(replay, buffer, bool(batches)), metrics)


def _chosen(replay: Replay, buffer: Forest, version: int, prompts: int, rng: np.random.Generator) -> np.ndarray:
    """i64[R], the stored groups that the rule draws."""
    if replay.groups is None or not buffer.problems:
        return np.zeros(0, np.int64)
    ranked = () if replay.priority is None else (buffer.facts["priority"],)
    return np.asarray(replay.groups(_born(buffer), version, prompts, rng, *ranked), np.int64)


def group_uids(forest: Forest) -> np.ndarray:
    """i64[P], the uid of the first trajectory of each group, by which a stored group is known."""
    owner = forest.prompt[forest.ends]
    return forest.uid[forest.ends][np.searchsorted(owner, np.arange(len(forest.problems)))].astype(np.int64)


def renewed(buffer: Forest, uids: np.ndarray, priorities: np.ndarray) -> Forest:
    """The buffer with these priorities f32[K] of groups by their `group_uids` i64[K]; groups that have left it are skipped."""
    known = dict(zip(uids.tolist(), priorities.tolist()))
    kept = [known.get(uid, old) for uid, old in zip(group_uids(buffer).tolist(), buffer.facts["priority"].tolist())]
    return buffer.with_facts({**buffer.facts, "priority": np.array(kept, np.float32)})


def _after(replay: Replay, buffer: Forest, drew: bool) -> Forest:
    """The buffer after a draw, which drew some groups or none."""
    return forests.select(buffer, np.zeros(len(buffer.problems), bool)) if replay.restarts and drew else buffer


def _select(replay: Replay, buffer: Forest, chosen: np.ndarray) -> Forest:
    """These groups in the order of the buffer, with their weights in the loss if the rule has weights."""
    kept = np.isin(np.arange(len(buffer.problems)), chosen)
    if replay.weights is None:
        return forests.select(buffer, kept).with_facts({})
    weights = replay.weights(buffer.facts["priority"])[kept] if len(kept) else np.zeros(0)
    return forests.select(buffer, kept).with_facts({"replay_weight": np.asarray(weights, np.float32)})


def empty(replay: Replay, planted: Forest) -> Forest:
    """An empty buffer, made from a forest without prompts."""
    return planted if replay.priority is None else planted.with_facts({"priority": np.zeros(0, np.float32)})


def mix(replay: Replay, fresh: Forest, stored: Forest, buffer: Forest, version: int, group: int, rng: np.random.Generator
        ) -> ReplayedBatch:
    """One batch of `fresh` groups of up to `group` rollouts, some with rollouts of the buffer, and of `stored` groups.

    The buffer afterwards contains the fresh rollouts that the rule admits, including replaced ones.
    """
    sampled = put_back(replay, fresh, buffer, group, rng)
    if replay.weights is not None:
        sampled = sampled.with_facts({**sampled.facts, "replay_weight": np.ones(len(sampled.problems), np.float32)})
    whole = forests.join([sampled.with_facts({name: sampled.facts[name] for name in stored.facts}), stored])
    buffer = store(replay, fresh, buffer, group, version + 1)
    ages, old = version - forests.versions(whole), ~np.isin(whole.uid[whole.ends], fresh.uid)
    metrics = {"replay/size": float(len(buffer.ends)), "replay/share": float(old.mean()) if len(old) else 0.0}
    return ReplayedBatch(whole, buffer, metrics | ({"replay/age": float(ages[old].mean())} if old.any() else {}))


def store(replay: Replay, fresh: Forest, buffer: Forest, group: int, version: int) -> Forest:
    """The buffer with what the rule admits of fresh groups of up to `group` rollouts, in its limits at this version.

    Groups of problems that a topology made are not stored.
    """
    rewards, valid = forests.outcomes(fresh, group)
    facts = {} if replay.priority is None else {"priority": replay.priority(rewards, valid)}
    admitted = replay.admit(rewards, valid) & (_ids(fresh) >= 0)[:, None]  # a checkpoint knows problems of the task alone
    if replay.newest:
        last = (_newer(_ids(fresh)) == 0) & valid.any(1)  # groups of a problem that end the storage of its older ones
        buffer = forests.select(buffer, ~np.isin(_ids(buffer), _ids(fresh)[last]))
        admitted = admitted & last[:, None]
    return limit(replay, add(buffer, fresh.with_facts(facts), admitted[valid]), version)


def put_back(replay: Replay, fresh: Forest, buffer: Forest, group: int, rng: np.random.Generator) -> Forest:
    """The fresh forest with the rollout that gives way in each group replaced by a stored one of the problem, if any.

    A problem that was drawn twice gets one replacement, so that no rollout comes twice in a batch.
    """
    if replay.gives_way is None:
        return fresh
    rewards, valid = forests.outcomes(fresh, group)
    place = replay.gives_way(rewards, valid, rng)
    stored_ids = _ids(buffer)[buffer.prompt[buffer.ends]]
    chosen, kept = np.zeros(len(stored_ids), bool), valid.copy()
    onto: dict[int, int] = {}
    for row in np.flatnonzero(place >= 0).tolist():
        number = fresh.problems[row].id
        if number not in onto and len(candidates := np.flatnonzero(stored_ids == number)):
            chosen[rng.choice(candidates)], kept[row, place[row]], onto[number] = True, False, row
    stored = _trim(buffer, chosen)
    return forests.graft(forests.trim(fresh, kept[valid]), stored, [onto[problem.id] for problem in stored.problems])


def add(buffer: Forest, fresh: Forest, admitted: np.ndarray) -> Forest:
    """The buffer with the trajectories of `fresh` where `admitted bool[R]` is True, in the order of its `ends`.

    `fresh` must have the facts that the buffer keeps.
    """
    new = _trim(fresh, admitted)
    bare = dataclasses.replace(new, computed=0, failures={}, invalid={}, seconds=())
    return forests.join([buffer, bare.with_columns(**_nothing(bare, len(bare.problems)))])


def limit(replay: Replay, buffer: Forest, version: int) -> Forest:
    """The buffer without rollouts too old for this version of the weights, then without the oldest beyond its capacity.

    Rules that replay stored groups lose whole groups, as the statistics of a part of a group are others.
    """
    ends = buffer.ends
    kept = np.ones(len(ends), bool)
    if replay.max_age is not None:
        kept &= version - forests.versions(buffer) <= replay.max_age
    if replay.per_prompt is not None:
        kept[kept] = _newer(_ids(buffer)[buffer.prompt[ends[kept]]]) < replay.per_prompt
    if replay.capacity is not None and replay.groups is not None:
        owner = buffer.prompt[ends]
        sizes = np.bincount(owner[kept], minlength=len(buffer.problems))
        kept &= (np.cumsum(sizes[::-1])[::-1] <= replay.capacity)[owner]
    elif replay.capacity is not None:
        kept[kept] = np.arange(kept.sum())[::-1] < replay.capacity
    return _trim(buffer, kept)


def stored_bytes(rollouts: int, prompt_tokens: int, tokens: int) -> int:
    """Bytes of `rollouts` rollouts of maximum length, each with its prompt: four numbers of 4 bytes per token."""
    return rollouts * 16 * (prompt_tokens + tokens)


def encode(buffer: Forest) -> dict[str, Any]:
    """The buffer as JSON, for a checkpoint: columns as a compressed archive in base64, with its checksum; objects as they are.

    Answers are read in the texts again. Problems of the task are known by their ids, those that a topology made are whole.
    """
    numbers, objects = _kinds(buffer)
    text, checksum = archived({name: buffer.columns[name] for name in numbers}
                              | {f"{_FACT}{name}": x for name, x in buffer.facts.items()})
    whole = {str(row): dataclasses.asdict(one) for row, one in enumerate(buffer.problems) if one.id < 0}
    return {"problems": _ids(buffer).tolist(), **({"made": whole} if whole else {}),
            **{name: buffer.columns[name].tolist() for name in objects}, "columns": text, "checksum": checksum}


def decode(stored: dict[str, Any], empty: Forest, problems: Sequence[Problem],
           extract: Callable[[str, Problem], Hashable | None] | None) -> Forest:
    """The encoded buffer; `empty` is one without rollouts, `problems` are the task's, `extract` reads answers if it has any.

    Raises OSError if the checksum does not match, ValueError for a column that is not in the checkpoint.
    """
    arrays = unpacked(stored["columns"], stored["checksum"], "the replay buffer of")
    numbers, objects = _kinds(empty)
    nodes = len(arrays.get("uid", ()))
    stored = {"reads": [None] * nodes, "writer": [""] * nodes, **stored}  # which earlier checkpoints lack
    if missing := [*({*numbers} - {*arrays}), *({*objects} - {*stored})]:
        raise ValueError(f"this run keeps the column {min(missing)!r}, which stored rollouts of the checkpoint lack; continue "
                         "with the configuration of the checkpoint, or start anew")
    columns: dict[str, Any] = {name: arrays[name] for name in numbers}
    columns |= {name: forests.objects(stored[name]) for name in objects}
    facts = {name: arrays[f"{_FACT}{name}"] for name in empty.facts}
    made = {int(row): _made(fields) for row, fields in stored.get("made", {}).items()}
    known = tuple(made[row] if number < 0 else problems[number] for row, number in enumerate(stored["problems"]))
    sampled = columns["role"] != forests.Role.PROMPT
    if empty.answers is not None:
        assert extract is not None
        columns["answers"] = forests.objects([extract(text, known[row]) if own else None for text, own, row in zip(
            columns["texts"], sampled, columns["prompt"])])
    return dataclasses.replace(empty.with_columns(**columns, **_nothing(empty, len(known))), problems=known, facts=facts)


def archived(arrays: Mapping[str, Any]) -> tuple[str, int]:
    """The arrays as a compressed archive in base64, and its checksum."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return base64.b64encode(file.getvalue()).decode(), zlib.crc32(file.getvalue())


def unpacked(text: str, checksum: int, what: str) -> dict[str, np.ndarray]:
    """The arrays of `archived`. Raises OSError, which names `what` of the checkpoint they are, if the checksum is another."""
    content = base64.b64decode(text)
    if zlib.crc32(content) != checksum:
        raise OSError(f"{what} this checkpoint is damaged: its checksum does not match; continue from an earlier checkpoint")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive}


def _kinds(forest: Forest) -> tuple[list[str], list[str]]:
    """The names of the columns of numbers and of objects that a checkpoint holds."""
    kept = [column for column in forest.of("node", "token") if column.name != "answers"]
    numbers = [column.name for column in kept if np.dtype(column.dtype) != object]
    return numbers, [column.name for column in kept if column.name not in numbers]


def _made(fields: Mapping[str, Any]) -> Problem:
    """A problem that a topology made, from its fields as JSON."""
    prompt = fields["prompt"]
    return Problem(**{**fields, "prompt": prompt if isinstance(prompt, str) else tuple(prompt)})


def _nothing(forest: Forest, prompts: int) -> dict[str, np.ndarray]:
    """Columns of stored prompts: what is known about the draw of a batch does not hold in a later one."""
    return {column.name: column.filled(prompts) for column in forest.of("prompt")}


def _ids(forest: Forest) -> np.ndarray:
    """i64[P], ids of the problems."""
    return np.array([problem.id for problem in forest.problems], np.int64)


def _born(buffer: Forest) -> np.ndarray:
    """i32[P], the version of the weights that sampled each group."""
    owner = buffer.prompt[buffer.ends]
    return forests.versions(buffer)[np.searchsorted(owner, np.arange(len(buffer.problems)))]


def _newer(ids: np.ndarray) -> np.ndarray:
    """i64[R], for each entry the number of later entries equal to it."""
    order = np.argsort(ids[::-1], kind="stable")
    ordered, newer = ids[::-1][order], np.empty(len(ids), np.int64)
    newer[order] = np.arange(len(ids)) - np.searchsorted(ordered, ordered)
    return newer[::-1]


def _trim(forest: Forest, kept: np.ndarray) -> Forest:
    """The trajectories where `kept bool[R]` is True, and the prompts that have one."""
    part = forests.trim(forest, kept)
    return forests.select(part, np.isin(np.arange(len(part.problems)), part.prompt[part.ends]))
