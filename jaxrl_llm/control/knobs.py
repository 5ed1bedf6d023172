"""Knobs: numbers that a controller sets and that some part of a run reads.

The part that reads a knob declares it in its `reads`; a controller names it in its `knobs`.
"""
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import parallel


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

    Raises ValueError: a value has another shape than its knob, or is outside its range.
    """
    found, sizes, named = dict[str, np.ndarray](), dict(sizes), dict[str, str]()
    for knob in {one.name: one for one in knobs}.values():
        if values.get(knob.name) is None:
            continue
        value = found[knob.name] = np.asarray(parallel.fetch(values[knob.name]))
        by = f" of controller {setters[knob.name]!r}" if knob.name in setters else ""
        for name, size in zip(knob.shape or (), value.shape):
            if sizes.setdefault(name, size) == size:
                named.setdefault(name, f"{knob.name} has {size}")
        wanted = tuple(sizes.get(name, name) for name in knob.shape or ())
        if value.shape != wanted:
            like = "; ".join(f"{name} is {sizes[name]}" + (f", as {named[name]}" if name in named else "")
                             for name in knob.shape or () if name in sizes)
            raise ValueError(f"{knob.name}{by} has shape {value.shape} and should have {_written(knob.shape)}"
                             f"{f', where {like}' if like else ''}")
        least, most = (sizes[end] if isinstance(end, str) else end for end in (knob.least, knob.most))
        low, high = (value.min(), value.max()) if value.size else (least, most)
        if not (least <= low and high <= most):
            raise ValueError(f"{knob.name}{by} has values from {low} to {high}; give numbers from {least} to {most}")
    return found


def _written(shape: tuple[str, ...] | None) -> str:
    return f"({', '.join(shape or ())}{',' * (len(shape or ()) == 1)})"
