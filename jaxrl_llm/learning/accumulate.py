"""The update from packed rows: a micro-batch is a number of rows, possibly much smaller than a prompt with its group.

The loss is one function of the log-probs of all trajectories, `[P, G, T]`, whichever rows computed them:
  1. `logprobs` runs every micro-batch forward and gathers their log-probs by the index.
  2. `differentiate` takes the loss of the whole mini-batch, and its derivative with respect to these log-probs.
  3. `accumulate` pulls the derivative back through every micro-batch and adds up the gradients.
  4. `apply` makes one optimiser step with them.
A mini-batch of one micro-batch runs all four in one program, with one forward pass less. Programs differ by the length of the
rows and the shape of the trajectories, not by the number of rows.

`gradient` alone is for whoever steps elsewhere, as a server does whose client says when: gradients of losses that are sums add
up over its calls, and `maths.descent.descend` makes the step.
"""
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import parallel
from jaxrl_llm.data.packing import Packed, PackedRows
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.state import TrainState, with_trained
from jaxrl_llm.learning.step import add_pulled_back, advance, losses, measuring
from jaxrl_llm.models import moe
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.parallel import indexed
from jaxrl_llm.tools.memo import remembered


class UpdateParts(NamedTuple):
    """The jitted parts of an update, see `make_parts`. `rows` are the rows of a micro-batch, whose first slot is `start`.

    policy: the policy that is updated.
    logprobs: `(view, params, lora, rows, index, start) -> view`; a view is `(logprobs, entropies, loads, *values)`, see
      `Policy.packed_logprobs`. It is donated.
    differentiate: `(view, rollouts, advantages, objective_state, tree) -> (cotangents, metrics, objective_state, grads)`; the
      cotangents are those of the view, and `grads` are zeros like the trained `tree`, to be added to.
    accumulate: `(grads, params, lora, rows, index, start, cotangents) -> grads`, the first donated.
    apply: `(state, grads, metrics, objective_state, rate) -> (state, metrics)`; the state is donated.
    whole: `(state, rows, index, rollouts, advantages, rate) -> (state, metrics)`: all of them for a single micro-batch.
    """

    policy: Policy
    logprobs: Callable
    differentiate: Callable
    accumulate: Callable
    apply: Callable
    whole: Callable


@remembered(8)  # equal parts, one program: runs of a process share it
def make_logprobs(policy: Policy) -> Callable:
    """The part `logprobs`, also for log-probs of a reference or of the policy before the first of several updates."""

    def logprobs(view, params, lora, rows, index, start):
        return jax.tree.map(jnp.add, view, _laid(policy.packed_logprobs(params, lora, rows, index - start), policy))

    return jax.jit(logprobs, donate_argnums=0)


def loss(policy: Policy, objective: Objective, view, rollouts: Rollouts, advantages, objective_state):
    """`(loss, (metrics, objective_state))` of all trajectories of a view, see `UpdateParts`."""
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))
    return losses(policy, objective, view, rollouts, advantages, objective_state)


def gradient(policy: Policy, objective: Objective, params, lora, objective_state, rows: PackedRows, index, rollouts: Rollouts,
             advantages):
    """`(gradient, metrics, objective_state)` of the loss of rollouts whose `rows` are one micro-batch; it changes nothing.

    The gradient is that of the adapters if there are any, else of the weights.
    """
    def of_tree(tree):
        view = policy.packed_logprobs(*with_trained(params, lora, tree), rows, index)
        return loss(policy, objective, view, rollouts, advantages, objective_state)

    (_, aux), grads = jax.value_and_grad(of_tree, has_aux=True)(params if lora is None else lora)
    return grads, *aux


@remembered(8)
def make_parts(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, *, clip_norm: float | None = 1.0
               ) -> UpdateParts:
    """The `UpdateParts` equivalent to `learning.step.make_update`, with the same arguments."""
    policy = measuring(policy, objective)

    def differentiate(view, rollouts, advantages, objective_state, tree):
        of_view = jax.value_and_grad(functools.partial(loss, policy, objective), has_aux=True)
        (_, (metrics, new)), cotangents = of_view(view, rollouts, advantages, objective_state)
        return cotangents, metrics, new, as_ruled(jax.tree.map(jnp.zeros_like, tree))

    def accumulate(grads, params, lora, rows, index, start, cotangents):
        here, (logprobs, entropies, loads, *values) = indexed.inside(index - start, rows.tokens.size), cotangents
        logprobs, entropies, *values = (jnp.where(here, x, 0) for x in (logprobs, entropies, *values))
        cotangents = logprobs, entropies, loads, *values
        def pulled(tree, c):
            return optax.tree.vdot(policy.packed_logprobs(*with_trained(params, lora, tree), rows, index - start), c)
        tree = params if lora is None else lora
        return as_ruled(add_pulled_back(grads, lambda c: jax.grad(pulled)(tree, c), cotangents))

    def apply(state, grads, metrics, objective_state, rate):
        return advance(optimizer, clip_norm, policy.mesh, state, grads, metrics, objective_state, rate)

    def whole(state, rows, index, rollouts, advantages, rate):
        return apply(state, *gradient(policy, objective, state.params, state.lora, state.objective_state, rows, index, rollouts,
                                      advantages), rate)

    def as_ruled(grads):
        mesh = policy.mesh
        return grads if mesh is None else jax.lax.with_sharding_constraint(grads, parallel.tree_shardings(grads, mesh))

    def donating(function):
        return jax.jit(function, donate_argnums=0)
    return UpdateParts(policy, make_logprobs(policy), jax.jit(differentiate), *map(donating, (accumulate, apply, whole)))


def update(parts: UpdateParts, size: int, state: TrainState, packed: Packed, rollouts: Rollouts, advantages,
           rate: np.float32 | None = None):
    """One optimiser step on a mini-batch of packed rows, `size` of them at a time: `(state, metrics)`.

    Args:
      size: rows of a micro-batch; on a mesh a multiple of data x fsdp.
      packed: rows that compute at least the tokens of `rollouts.token_mask`; their number is a multiple of `size`.
      rollouts, advantages: of all trajectories. Tokens and prompts in them are not read.
      rate: a factor of the learning rate, see `learning.step.make_update`.
    Raises ValueError: as in `placed`.
    """
    policy, rollouts = parts.policy, rollouts.replace(filled=4)
    micro_batches, index = placed(policy, size, packed)
    if len(micro_batches) == 1:
        return parts.whole(state, micro_batches[0][0], index, rollouts, advantages, rate)
    view = view_of(parts.logprobs, policy, state.params, state.lora, micro_batches, index)
    cotangents, metrics, objective_state, grads = parts.differentiate(view, rollouts, advantages, state.objective_state,
                                                                      state.trainable)
    for rows, start in micro_batches:
        grads = parts.accumulate(grads, state.params, state.lora, rows, index, start, cotangents)
    return parts.apply(state, grads, metrics, objective_state, rate)


def view_of(logprobs: Callable, policy: Policy, params, lora, micro_batches, index):
    """The view `(logprobs, entropies, loads, *values)` of all trajectories, from the micro-batches of `placed`."""
    config, zeros = policy.model.config, lambda *shape: jnp.zeros(shape, jnp.float32)
    def of_experts():
        return zeros(1, config.num_layers, config.experts.count)
    loads = None if config.experts is None else moe.Loads(of_experts(), of_experts())
    values = () if policy.position is None else (zeros(*index.shape),)
    view = _laid((zeros(*index.shape), zeros(*index.shape), loads, *values), policy, parallel.put)
    for rows, start in micro_batches:
        view = logprobs(view, params, lora, rows, index, start)
    return view


def placed(policy: Policy, size: int, packed: Packed):
    """`(micro_batches, index)` on the devices: for each micro-batch its rows and the number of its first slot.

    Raises ValueError if the rows do not divide evenly, or a trajectory is longer than the model's rope scaling allows.
    """
    policy.model.check_length(int(packed.rows.positions.max(initial=-1)) + 1)
    count, length = packed.node.shape
    if count % size:
        raise ValueError(f"{count} packed rows do not divide into micro-batches of {size}; pack them with multiple={size}")
    mesh = policy.mesh
    spread, cut = (None, None) if mesh is None else (parallel.batch_sharding(mesh), parallel.rows_sharding(mesh))
    if mesh is not None and length % mesh.shape["seq"]:
        raise ValueError(f"packed rows of {length} slots do not divide over mesh.seq={mesh.shape['seq']}; pack them into rows "
                         "whose length does")
    rows = [jax.tree.map(lambda x: x[first:first + size], packed.rows) for first in range(0, count, size)]
    starts = np.arange(0, count * length, size * length, dtype=np.int32)
    return list(zip(parallel.put(rows, cut), starts)), parallel.put(packed.index, spread)


def _laid(view, policy, lay=jax.lax.with_sharding_constraint):
    """A view with trajectories sharded over the mesh and loads replicated on every device."""
    if policy.mesh is None:
        return view
    logprobs, entropies, loads, *values = view
    spread, everywhere = parallel.batch_sharding(policy.mesh), parallel.replicated(policy.mesh)
    logprobs, entropies, *values = lay((logprobs, entropies, *values), spread)
    return logprobs, entropies, None if loads is None else lay(loads, everywhere), *values
