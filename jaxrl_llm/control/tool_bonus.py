"""SPEAR's reward for turns that call tools, which fades (arXiv 2509.22601)."""
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.tools.registry import Conflict


def tool_coef(step: Array, *, decay: int = 200) -> Array:
    """`(1 + cos(pi * step / decay)) / 2`, 0 from `decay` on: the weight of the reward."""
    return (1 + jnp.cos(jnp.pi * jnp.minimum(step / decay, 1.0))) / 2


def tool_reward(turns: Any, coef: Any) -> Any:
    """`coef * min(0.1 * turns, 1)`, the reward for `turns` turns with tool calls; arrays of NumPy or JAX."""
    return coef * (0.1 * turns).clip(max=1.0)


_UNCOUNTED = Conflict(
    ("environment",), "method {method!r} rewards turns that call tools, and environment {0.name!r} has tools but not the fact "
    "'tool_calls'", "add it, or take another method, for example grpo",
    lambda environment: environment.tools and "tool_calls" not in environment.facts)


@controller(conflicts=(_UNCOUNTED,))
def tool_bonus(*, decay: int = 200) -> Controller:
    """`tool_coef`: that of the step after `step` others, 1 in the first one.

    Tasks and environments without tools have no turns that call them. Raises ValueError for fewer than one step.
    """
    if decay < 1:
        raise ValueError(f"decay={decay}; give the number of steps until calls earn nothing, 1 or more")
    return Controller(lambda: jnp.int32(0), lambda step: {"tool_coef": tool_coef(step, decay=decay)},
                      lambda step, facts: step + 1, facts=("step",), knobs=("tool_coef",))
