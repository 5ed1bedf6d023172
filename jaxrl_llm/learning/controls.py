"""The controllers of a run: the facts that they observe, and the knobs that they set."""
import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import parallel
from jaxrl_llm.control import Controller, Fact, Known
from jaxrl_llm.control.knobs import at_odds
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.learning.state import TrainState
from jaxrl_llm.tools import registry

FORMER = {"moving_reference": "t1", "reference_reset": "prorl", "recent_median": "spear"}  # names in earlier checkpoints
MEASURED = ("measured_tried", "measured_right")  # facts of a measure, see `sampling.asked`
FACTS = (
    Fact("step", "i32[], the number of the step, from 0"),
    Fact("prompt_ids", "i32[P]"),
    Fact("rewards", "f32[P, G]"),
    Fact("solved", "bool[P, G], rollouts that solve their problem"),
    Fact("valid", "bool[P, G], rollouts that exist and were sampled in this step"),
    Fact("lengths", "i32[P, G], trained tokens of these"),
    Fact("entropy", "f32[], nats, mean over the sampled tokens of the distribution that they were drawn from"),
    Fact("rollouts", "`Rollouts` as they were learned from: groups may be cut into several rows"),
    Fact("ratios", "f32[P, G, T], probability of each token of `rollouts` after the updates of the step over that before"),
    Fact("params", "parameters after the step"),
    Fact("metrics", "f32[] by name, those of the step's updates; there are none where nothing was learned from"),
    Fact("score", "f32[], the held-out score, after each evaluation"),
)
_SOMETIMES = {"entropy", "metrics"}  # they are missing in a step that sampled no token, or learned from none


@dataclasses.dataclass(frozen=True)
class Controls:
    """Controllers by name; their states are pytrees by name, in `TrainState.control`.

    The parts of a run tell them its facts, see `control.Fact`, and read the knobs that they set. Raises ValueError: two
    controllers set one knob, or one observes steps and evaluations.
    """

    by_name: Mapping[str, Controller] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if found := at_odds(self.by_name):
            raise ValueError("; ".join(found))

    @property
    def knobs(self) -> frozenset[str]:
        """Names of the knobs that they set."""
        return frozenset(self.setters)

    @property
    def setters(self) -> dict[str, str]:
        """The controller that sets each knob, by the knob's name."""
        return {knob: name for name, one in self.by_name.items() for knob in one.knobs}

    def init(self, known: Iterable[Known] = ()) -> dict[str, Any]:
        """States before the first step; each `init` takes its named arguments from what is `known`.

        Raises ValueError if one of them is not known.
        """
        values = {one.name: one.value for one in known}
        for name in self.by_name:
            if strange := [key for key in self.asked(name) if key not in values]:
                raise ValueError(f"the init of controller {name!r} takes {', '.join(strange)}, and this run knows "
                                 f"{', '.join(sorted(values)) or 'nothing'}")
        taken = {key: values[key]() for name in self.by_name for key in self.asked(name)}
        states = {name: one.init(**{key: taken[key] for key in self.asked(name)}) for name, one in self.by_name.items()}
        # An array at two places of a tree cannot be donated twice; weak types would make the next step recompile.
        return jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), states)

    def asked(self, name: str) -> list[str]:
        """The names of the values that the state of this controller depends on."""
        return list(inspect.signature(self.by_name[name].init).parameters)

    def begun(self, name: str, state: Any, mesh: Mesh) -> Any:
        """The state of this controller at the beginning of a phase, after one that it ended with `state`."""
        begin = self.by_name[name].begin
        if begin is None:
            return state
        new = jax.tree.map(lambda x: jnp.array(x, jnp.result_type(x)), begin(state))  # no array at two places, see `init`
        return parallel.put(new, parallel.tree_shardings(new, mesh))

    def proposed(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all knobs that they set, by name."""
        return {knob: value for name, one in self.by_name.items() for knob, value in one.propose(states[name]).items()}

    def observe(self, states: Mapping[str, Any], facts: Mapping[str, Any], mesh: Mesh, consume: bool = True) -> dict[str, Any]:
        """The states after the facts of a step, or after the `score` of an evaluation, which has controllers of its own.

        A controller is unchanged if a fact that it reads is missing. `consume`: old states are lost. Raises ValueError if a
        step with rollouts lacks a fact that comes with every one of them, or with none.
        """
        def given(state):
            return state if consume else jax.tree.map(jax.numpy.copy, state)

        observing = {name: read for name, one in self.by_name.items() if (read := _read(one, facts)) is not None}
        for name, read in observing.items() if "rollouts" in facts else ():
            for fact in sorted({*read} - facts.keys() - _SOMETIMES):
                raise _never(name, fact, facts)
        return {name: _observe(one, mesh, given(states[name]), {fact: facts[fact] for fact in observing[name]})
                if name in observing and facts.keys() >= {*observing[name]} else states[name]
                for name, one in self.by_name.items()}


def _read(controller: Controller, facts: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The facts that a controller reads at an event with these facts; None: it does not observe such events.

    Events are steps, evaluations (`score`) and measures of training problems (`MEASURED`). A controller of steps may read the
    facts of measures too: `observe` is then called with either.
    """
    if "score" in facts or "score" in controller.facts:
        return controller.facts if "score" in facts and "score" in controller.facts else None
    read = tuple(fact for fact in controller.facts if (fact in MEASURED) == (MEASURED[0] in facts))
    return read if read or (not controller.facts and MEASURED[0] not in facts) else None


def _never(name: str, fact: str, facts: Mapping[str, Any]) -> ValueError:
    """The error for a fact that steps with these facts do not have."""
    docs = {one.name: one.doc for one in FACTS}
    near = registry.nearest(fact, {*facts, *docs}, 1)
    hint = f" It is {docs[fact]}." if fact in docs else f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"controller {name!r} observes {fact!r}, which no step of this run has.{hint} A step has "
                      f"{', '.join(sorted({*facts, *_SOMETIMES}))}; an evaluation has score")


def with_former_names(state: TrainState) -> TrainState:
    """The state with its controllers by the names that earlier versions saved."""
    return state.replace(control={FORMER.get(name, name): inner for name, inner in state.control.items()})


def with_present_names(state: TrainState, names: Iterable[str]) -> TrainState:
    """The state with the controllers of these names, some of which it may have by their former ones."""
    return state.replace(control={name: state.control[name if name in state.control else FORMER[name]] for name in names})


def facts_of(rollouts: Rollouts, batch: Rollouts, params: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The `FACTS` of a step: of `rollouts` on the host without replayed ones, and of the trained `batch`."""
    tokens = np.asarray(rollouts.token_mask & rollouts.fresh[..., None])
    facts = {"prompt_ids": rollouts.prompt_ids, "rewards": rollouts.rewards, "valid": rollouts.fresh,
             "solved": np.asarray(rollouts.correct), "lengths": tokens.sum(-1, dtype=np.int32), "rollouts": batch,
             "params": params}
    drawn = tokens if rollouts.role is None else tokens & np.asarray(rollouts.role == Role.POLICY)
    if rollouts.entropies is not None and drawn.any():
        facts["entropy"] = np.mean(rollouts.entropies, where=drawn, dtype=np.float32)
    if metrics:
        facts["metrics"] = {name: np.float32(value) for name, value in metrics.items()}
    return facts


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _observe(controller: Controller, mesh: Mesh, state, facts):
    """The state after these facts, with the sharding of the old state."""
    new = controller.observe(state, facts)
    return jax.lax.with_sharding_constraint(new, parallel.tree_shardings(new, mesh))
