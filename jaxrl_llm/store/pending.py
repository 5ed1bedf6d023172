"""Batches that are sampled and not yet learned from, as JSON in a checkpoint."""
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.finished import Finished
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.source import Source

_OF_FOREST = ("computed", "failures", "invalid", "seconds")  # beside its columns
_EXTRA = "extras/"  # prefix of the names of further entries of rollouts


def encode(batch: Finished) -> dict[str, Any]:
    """The batch as JSON: the forest as of a replay buffer, arrays as compressed archives with checksums."""
    forest = batch.forest
    return {"forest": buffers.encode(forest), **{name: getattr(forest, name) for name in _OF_FOREST},
            "prompts": _archive({name: x for name, x in _of_prompts(forest).items() if x.dtype != object}),
            "objects": {name: x.tolist() for name, x in _of_prompts(forest).items() if x.dtype == object},
            "facts": sorted(forest.facts),
            "rollouts": None if batch.rollouts is None else _of_rollouts(batch.rollouts),
            **({"replayed": [_of_rollouts(one) for one in batch.replayed]} if batch.replayed else {}),
            "metrics": {name: float(value) for name, value in batch.metrics.items()}, "counts": _archive(batch.counts)}


def restored(stored: Sequence[Mapping[str, Any]], source: Source, lag: int) -> tuple[Finished, ...]:
    """The batches that wait in a checkpoint. Raises ValueError where a run with this lag and source cannot learn from them."""
    if len(stored) > lag:
        raise ValueError(f"{len(stored)} sampled batches wait in the checkpoint, and config.schedule keeps {lag}; continue "
                         f"with schedule=\"pipelined(lag={len(stored)})\", or start a new run with these weights (model.path)")
    batches = tuple(decode(one, source) for one in stored)
    sizes, most = source.ladders, source.most
    for rollouts in (part for one in batches for part in (one.rollouts, *one.replayed) if part is not None):
        _, G, T = rollouts.mask.shape
        S = rollouts.prompt_tokens.shape[1]
        if G != most or T > sizes.tokens[-1] or S > sizes.prompt_tokens[-1]:
            raise ValueError(f"a batch that waits in the checkpoint has {G} rollouts of a prompt, up to {T} tokens each, "
                             f"behind prompts of up to {S}, and this configuration {most}, {sizes.tokens[-1]} and "
                             f"{sizes.prompt_tokens[-1]}; continue with the sizes in `sampling` and `prompts` that the run had")
    return batches


def decode(stored: Mapping[str, Any], source: Source) -> Finished:
    """The batch, for a source of the same task and reward. Raises OSError if a checksum does not match."""
    empty = source.planted([], draw=0)
    empty = empty.with_facts(dict.fromkeys(stored["facts"], np.zeros(0)))
    forest = buffers.decode(stored["forest"], empty, source.task.train, source.stream.partner.extract)
    objects = {name: forests.objects(values) for name, values in stored.get("objects", {}).items()}
    forest = forest.with_columns(**_arrays(stored["prompts"]), **objects)
    counts: dict[str, Any] = {name: stored[name] for name in _OF_FOREST}
    forest = dataclasses.replace(forest, **counts | {"seconds": tuple(counts["seconds"])})
    rollouts = None if stored["rollouts"] is None else _as_rollouts(stored["rollouts"])
    return Finished(rollouts, forest, dict(stored["metrics"]), _arrays(stored["counts"]),
                    tuple(map(_as_rollouts, stored.get("replayed", ()))))


def _of_rollouts(rollouts: Rollouts) -> dict[str, Any]:
    fields: dict[str, Any] = {field.name: getattr(rollouts, field.name) for field in dataclasses.fields(rollouts)}
    fields |= {f"{_EXTRA}{name}": x for name, x in fields.pop("extras").items()}
    return _archive({name: x for name, x in fields.items() if x is not None})


def _as_rollouts(stored: Mapping[str, Any]) -> Rollouts:
    arrays: dict[str, Any] = _arrays(stored)
    extras: dict[str, Any] = {name.removeprefix(_EXTRA): arrays.pop(name) for name in [*arrays] if name.startswith(_EXTRA)}
    return Rollouts(**arrays | {"filled": int(arrays["filled"])}, extras=extras)


def _of_prompts(forest: Forest) -> dict[str, np.ndarray]:
    return {column.name: forest.columns[column.name] for column in forest.of("prompt")}


def _archive(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(("bytes", "checksum"), buffers.archived(arrays)))


def _arrays(stored: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return buffers.unpacked(stored["bytes"], stored["checksum"], "a batch that waits in")
