"""What only a part of a step needs, kept in the memory of the host for the rest of it (`config.learner.offload`).

The state of the optimiser comes to the devices for the updates, reference weights while they score. Copies: no bit changes.
Checkpoints save and restore both where they lie.
"""
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl_llm.training.config import parts
from jaxrl_llm.training.state import TrainState


def away(config: ConfigDict, name: str, tree: Any) -> Any:
    """The tree in page-locked memory of the host, if `config.learner.offload` has this name, else as it is."""
    return _move(tree, "pinned_host") if name in parts(config.learner.offload) else tree


def near(config: ConfigDict, name: str, tree: Any) -> Any:
    """The tree on the devices, in the layout that it had there."""
    return _move(tree, "device") if name in parts(config.learner.offload) else tree


def moments_away(config: ConfigDict, state: TrainState) -> TrainState:
    """The state with that of the optimiser, and of the critic's if there is one, `away`, whatever it consists of."""
    return _with_moments(state, lambda tree: away(config, "optimizer", tree))


def moments_near(config: ConfigDict, state: TrainState) -> TrainState:
    """The state as updates take it."""
    return _with_moments(state, lambda tree: near(config, "optimizer", tree))


def _with_moments(state: TrainState, move) -> TrainState:
    if state.critic is not None:
        state = state.replace(critic=state.critic.replace(opt_state=move(state.critic.opt_state)))
    return state.replace(opt_state=move(state.opt_state))


def _move(tree: Any, kind: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)
