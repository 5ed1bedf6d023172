"""Schedules of numbers of a loss, written as text: `linear(0.1, 0)`, `cosine(0, 1, steps=200)`, `after(0.001, 50)`."""
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import one_of

Schedule = Callable[[Array], Array]  # f32[] at a step i32[], counted from 0


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in equal steps, then `end`."""
    return optax.linear_schedule(start, end, steps)


def cosine(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` along half a cosine, then `end`."""
    return lambda step: end + (start - end) * (1 + jnp.cos(jnp.pi * jnp.minimum(step / steps, 1.0))) / 2


def after(value: float, step: int) -> Schedule:
    """0 in the first `step` steps, then `value`."""
    return lambda now: jnp.where(now < step, 0.0, value)


SCHEDULES: dict[str, Callable[..., Schedule]] = {"linear": linear, "cosine": cosine, "after": after}


def is_schedule(value: Any) -> bool:
    """Whether the value of a number is a schedule as text."""
    return isinstance(value, str) and value.endswith(")")


def takes_steps(text: str) -> bool:
    """Whether the schedule ends with the steps of the run, for want of an end of its own."""
    name, given = _read(text)
    return "steps" in inspect.signature(SCHEDULES[name]).parameters and "steps" not in given


def schedule(text: str, steps: int | None = None) -> Schedule:
    """The schedule of this text, over `steps`, those of a run, if it names none. ValueError: it reads otherwise."""
    name, given = _read(text)
    if takes_steps(text) and steps is not None:
        given["steps"] = steps
    wanted = [*inspect.signature(SCHEDULES[name]).parameters]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in given.values())
    if {*given} != {*wanted} or not numbers or given.get("steps", 1) < 1 or given.get("step", 0) < 0:
        raise ValueError(f"{text!r}: the schedule {name} has the numbers {', '.join(wanted)}, steps of 1 or more, "
                         "e.g. linear(start=0.1, end=0) over a run, linear(0.1, 0, steps=200), or after(value=0.001, step=50)")
    return SCHEDULES[name](**given)


def ends(text: str) -> tuple[float, ...]:
    """The numbers between which the values of a schedule lie; ValueError: it reads otherwise."""
    schedule(text, 1)
    _, given = _read(text)
    return tuple(given[name] for name in ("start", "end", "value") if name in given)


def _read(text: str) -> tuple[str, dict[str, Any]]:
    def order(name: str) -> list[str]:
        return [*inspect.signature(SCHEDULES[one_of("schedule", name, SCHEDULES)]).parameters]

    if len(several := written.parts(text)) > 1:
        raise ValueError(f"{text!r} are {len(several)} schedules; give one")
    name, given = written.call(text, order)
    for option in given:
        one_of(f"option of the schedule {name!r}", option, order(name))
    one_of("schedule", name, SCHEDULES)
    return name, given
