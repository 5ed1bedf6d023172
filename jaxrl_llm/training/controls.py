"""The controllers of a run: what they observe of it, and the settings that they propose."""
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.control import Controller


@dataclasses.dataclass(frozen=True)
class Controls:
    """Controllers by name; their states are pytrees by name, in `TrainState.control`.

    A run lets them observe `rollouts` and `params` after each step and `score`, the held-out accuracy, after each evaluation
    that follows one. What it reads of them: the setting with the name of a recorder is what the recorder keeps, for instance
    `reference`; `reset` (bool) makes the policy the reference of the steps to come and clears the optimiser.
    """

    by_name: Mapping[str, Controller] = dataclasses.field(default_factory=dict)

    @property
    def knobs(self) -> frozenset[str]:
        """Names of all settings."""
        return frozenset(knob for one in self.by_name.values() for knob in one.knobs)

    def init(self, **known: Any) -> dict[str, Any]:
        """States before the first step, of controllers whose `init` takes what is `known` by name: `params`, `prompts`."""
        return {name: one.init(**{key: known[key] for key in inspect.signature(one.init).parameters})
                for name, one in self.by_name.items()}

    def settings(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """All settings by name."""
        found: dict[str, Any] = {}
        for name, one in self.by_name.items():
            found |= one.propose(states[name])
        return found

    def observe(self, states: Mapping[str, Any], facts: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        """The states after these facts; a controller that reads others is left as it is."""
        return {name: _observe(one, mesh, states[name], {fact: facts[fact] for fact in one.facts})
                if facts.keys() >= set(one.facts) else states[name] for name, one in self.by_name.items()}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _observe(controller: Controller, mesh: Mesh, state, facts):
    """The state after these facts, laid out as the one before."""
    new = controller.observe(state, facts)
    return jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh))
