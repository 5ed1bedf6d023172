"""Trees that only a part of a step needs, kept in host memory for the rest of the step (`config.learner.offload`).

The state of the optimiser comes to the devices for the updates, reference weights for their log-probs. They are copied without
any change of bits. Checkpoints save and restore both in their current memory.
"""
from typing import Any

import jax

from jaxrl_llm.learning.state import TrainState


def away(names: tuple[str, ...], name: str, tree: Any) -> Any:
    """The tree in page-locked memory of the host if `names` has this name, else unchanged."""
    return _move(tree, "pinned_host") if name in names else tree


def near(names: tuple[str, ...], name: str, tree: Any) -> Any:
    """The tree on the devices, in the layout that it had there."""
    return _move(tree, "device") if name in names else tree


def moments_away(names: tuple[str, ...], state: TrainState) -> TrainState:
    """The state with the optimiser states of the policy and of the models trained beside it `away`."""
    return _with_moments(state, lambda tree: away(names, "optimizer", tree))


def moments_near(names: tuple[str, ...], state: TrainState) -> TrainState:
    """The state with its optimiser states on the devices, for updates."""
    return _with_moments(state, lambda tree: near(names, "optimizer", tree))


def _with_moments(state: TrainState, move) -> TrainState:
    beside = {name: own.replace(opt_state=move(own.opt_state)) if hasattr(own, "opt_state") else own
              for name, own in state.beside.items()}
    return state.replace(opt_state=move(state.opt_state), beside=beside)


def _move(tree: Any, kind: str) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)
