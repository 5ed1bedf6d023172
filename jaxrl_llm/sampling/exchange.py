"""Forests over processes: each grows its share of the trajectories, and all of them get the whole."""
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.data.forest import Forest, grow


def is_mine(uid: int, group: int) -> bool:
    """Whether this process samples a trajectory: whole groups are dealt in turns, by their uids alone."""
    return uid // group % jax.process_count() == jax.process_index()


def exchange(forest: Forest, grown: Forest) -> Forest:
    """The forest with what the processes have `grown` from it, by uid; every process gets the same."""
    first, token = len(forest.uid), int(forest.length.sum())
    mine = {column.name: grown.columns[column.name][{"node": first, "token": token}[column.of]:]
            for column in forest.of("node", "token")}
    lost = grown.lost - forest.lost
    counts = {name: Counter(getattr(grown, name)) - Counter(getattr(forest, name)) for name in ("failures", "invalid")}
    seen = parallel.gather_objects((mine, lost, counts, grown.computed - forest.computed, grown.seconds[len(forest.seconds):]))
    parts, losses, counted, computed, seconds = zip(*seen, strict=True)
    starts = np.cumsum([first, *(len(part["uid"]) for part in parts)])
    moved = [part | {"parent": np.where(part["parent"] < first, part["parent"], part["parent"] + (start - first))}
             for part, start in zip(parts, starts)]
    whole = {name: np.concatenate([part[name] for part in moved]) for name in mine}
    order = np.argsort(whole["uid"], kind="stable")
    place = np.concatenate([np.arange(first), first + np.argsort(order, kind="stable")]).astype(np.int32)
    begins, length = np.cumsum(whole["length"]) - whole["length"], whole["length"][order]
    tokens = np.repeat(begins[order] - (np.cumsum(length) - length), length) + np.arange(length.sum())
    columns = {column.name: whole[column.name][tokens if column.of == "token" else order]
               for column in forest.of("node", "token")}
    joined = grow(forest, place[columns.pop("parent")], columns.pop("uid"), columns, computed=sum(computed),
                  seconds=[second for part in seconds for second in part],
                  **{name: sum((count[name] for count in counted), Counter()) for name in counts})
    return joined.with_columns(lost=(forest.lost + sum(losses)).astype(np.int32))


def check_same(values: Mapping[str, Any], when: str) -> None:
    """Raises ValueError with both values if the processes of a run differ in one of these; arrays are shown as digests."""
    told = {f"{name} {when}": _told(parallel.fetch(value)) for name, value in values.items() if value is not None}
    parallel.check_same(told, "what processes sample and learn would part from here on: see whether an environment, a reward "
                        "or a controller of your own draws random numbers, or reads a clock or a file of its host")


def _told(value: Any) -> str:
    if np.ndim(value) == 0:
        return str(value)
    return f"{np.shape(value)} {hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()}"
