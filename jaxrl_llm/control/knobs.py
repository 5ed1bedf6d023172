"""Knobs: numbers that a controller sets and that some part of a run reads.

The part that reads a knob declares it in its `reads`; a controller names it in its `knobs`.
"""
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.control.base import Controller
from jaxrl_llm.tools import registry


class Knob(NamedTuple):
    """A number, or an array of numbers, that a part reads from controllers.

    name: as controllers provide it.
    shape: sizes, by name: those of the reader, such as "N" training problems; any other name stands for one size throughout a
      step. None: a tree of weights, which stays with the learner.
    least, most: the range of its entries; a name stands for a number of the reader.
    doc: dtype, shape, unit and meaning.
    """

    name: str
    shape: tuple[str, ...] | None = ()
    least: float | str = float("-inf")
    most: float | str = float("inf")
    doc: str = ""


def read(knobs: Iterable[Knob], values: Mapping[str, Any], sizes: Mapping[str, int], setters: Mapping[str, str] = {}
         ) -> dict[str, np.ndarray]:
    """The values of these knobs on the host, by name, without those that nothing sets.

    Args:
      values: what controllers set, by name; None: nothing.
      sizes: the reader's numbers by the names that knobs have for them.
      setters: the controller that sets each of them, as far as that is known.

    Raises ValueError: a value has another shape than its knob, or is outside its range, that of each part which reads it.
    """
    found, sizes, like = dict[str, np.ndarray](), dict(sizes), dict[str, str]()
    for knob in dict.fromkeys(knobs):
        if values.get(knob.name) is None:
            continue
        value = found[knob.name] = np.asarray(parallel.fetch(values[knob.name]))
        by = f" of controller {setters[knob.name]!r}" if knob.name in setters else ""
        _check_shape(knob, value.shape, by, sizes, like)
        least, most = (sizes[end] if isinstance(end, str) else end for end in (knob.least, knob.most))
        low, high = (value.min(), value.max()) if value.size else (least, most)
        if not (least <= low and high <= most):
            given = f"={value}{by}" if value.ndim == 0 else f"{by} has numbers from {low} to {high}"
            ends = [f"{end} or {word}" for end, word in ((least, "more"), (most, "less")) if np.isfinite(end)]
            raise ValueError(f"{knob.name}{given}; give {' and '.join(ends) or 'a number'}")
    return found


def _check_shape(knob: Knob, shape: tuple[int, ...], by: str, sizes: dict[str, int], like: dict[str, str]) -> None:
    """Notes new `sizes`, and that they are `like` those of this knob; ValueError if a size is another one."""
    names = knob.shape or ()
    if len(shape) == len(names) and all(sizes.get(name, size) == size for name, size in zip(names, shape)):
        for name, size in zip(names, shape):
            if name not in sizes:
                sizes[name], like[name] = size, f", as {knob.name} has"
        return
    known = "; ".join(f"{name} is {sizes[name]}{like.get(name, '')}" for name in names if name in sizes)
    wanted = f"({', '.join(names)}{',' * (len(names) == 1)})"
    raise ValueError(f"{knob.name}{by} has shape {shape} and should have {wanted}{f', where {known}' if known else ''}")


def at_odds(controllers: Mapping[str, Controller]) -> list[str]:
    """A sentence for each knob that several controllers set, and each controller of steps and evaluations."""
    setters: dict[str, list[str]] = {}
    mixed = {name: sorted({*one.facts} - {"score"}) for name, one in controllers.items() if "score" in one.facts}
    for name, one in controllers.items():
        for knob in one.knobs:
            setters.setdefault(knob, []).append(name)
    twice = [f"controllers {' and '.join(map(repr, names))} both set {knob}; leave one of them out"
             for knob, names in setters.items() if len(names) > 1]
    return twice + [f"controller {name!r} observes score, which comes with evaluations, and {', '.join(others)}, which come "
                    "with steps: they are never there together; make two controllers of it"
                    for name, others in mixed.items() if others]


def unread(controllers: Mapping[str, Controller], readers: Mapping[str, Iterable[Knob]]) -> list[str]:
    """A sentence for each knob that a controller sets and no part reads; `readers`: the knobs that parts read, by part."""
    read_by = {knob.name: part for part, knobs in readers.items() for knob in knobs}
    found = []
    for name, one in controllers.items():
        for knob in sorted({*one.knobs} - read_by.keys()):
            near = registry.nearest(knob, read_by, 2)
            hint = f" Did you mean {' or '.join(f'{other!r}, which {read_by[other]} reads' for other in near)}?" if near else ""
            found.append(f"controller {name!r} sets {knob!r}, which no part of this run reads.{hint} Knobs are "
                         f"{', '.join(sorted(read_by))}")
    return found
