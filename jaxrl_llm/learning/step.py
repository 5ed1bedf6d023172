"""The update: from rollouts and advantages to new weights, as one pure jitted function of the state."""
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.advantages.base import Estimator
from jaxrl_llm.data.rollouts import CURRENT_ENTROPIES, POSITION, Role, Rollouts, known_logprobs, sampled_logprobs, without_apart
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.state import TrainState, with_trained
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import descend, keep_finite, split
from jaxrl_llm.models import moe
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.parallel import tree_shardings
from jaxrl_llm.tools.memo import remembered

_CHOSEN = "moe/chosen"  # tokens of each expert, f32[L, E]: they add up over micro-batches, unlike the reported metric
Update = jax.stages.Wrapped  # (TrainState, Rollouts, advantages f32[P, G, T], rate f32[] | None) -> (TrainState, metrics)


def in_parts(function: Callable, parts: int) -> Callable:
    """`function(params, lora, rollouts)` with `[P, ...]` results, run on `parts` equal parts of the prompts in turn."""
    if parts == 1:
        return function

    def whole(params, lora, rollouts):
        mapped = jax.lax.map(lambda part: function(params, lora, part), split(rollouts, parts))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)

    return whole


@remembered(32)  # equal arguments, one program: runs of a process share it
def jitted(function: Callable, owner: Hashable, parts: int = 1, **settings: Any) -> Callable:
    """The jitted `function(owner, params, lora, rollouts, **settings)`, on `parts` equal parts of the prompts in turn."""
    return jax.jit(in_parts(functools.partial(function, owner, **settings), parts))


def merge_metrics(metrics):
    """Metrics of micro-batches, stacked on axis 0, into those of the whole: sums, and maxima for names in `max/`."""
    return {name: x.max(0) if name.startswith("max/") else x.sum(0) for name, x in metrics.items()}


def mismatch(rollouts: Rollouts, logprobs: jax.Array) -> dict[str, jax.Array]:
    """Disagreement of sampler and learner about the same tokens: `mean(lp_sampler - lp_learner)` and the largest |difference|.

    Replayed rollouts, which other weights sampled, tokens that others wrote and unknown log-probs (NaN) count as 0.
    """
    if rollouts.behavior_logprobs is None:
        return {}
    mask = rollouts.token_mask & rollouts.fresh[..., None] & ~jnp.isnan(rollouts.behavior_logprobs)
    if rollouts.role is not None:
        mask = mask & (rollouts.role == Role.POLICY)
    gap = jnp.where(mask, rollouts.behavior_logprobs - logprobs, 0.0)
    weights = rollouts.loss_weights["token"]
    return {"mismatch/kl": masked.sum(gap * weights, mask), "max/mismatch": jnp.abs(gap).max()}


def against_sampler(objective: Objective) -> Objective:
    """The objective for old log-probs that are the sampler's: the `mismatch` it reports is that to the policy it updates."""
    def update(logprobs, rollouts, advantages, state):
        loss, (metrics, state) = objective.update(logprobs, rollouts, advantages, state)
        return loss, (metrics | mismatch(rollouts, jax.lax.stop_gradient(logprobs)), state)

    return objective._replace(update=update)


def measuring(policy: Policy, objective: Objective) -> Policy:
    """The policy that measures what the objective computes of the logits at each position."""
    return policy if objective.position is None else dataclasses.replace(policy, position=objective.position)


def loss_terms(objective: Objective, logprobs, entropies, rollouts, advantages, objective_state, values=None):
    """`(loss, (metrics, objective_state))` of one (micro-)batch; without `old_logprobs` the batch is on-policy.

    Where the sampler did not draw a token under its own text, or its log-prob is unknown (NaN), the old one counts, so that
    the token has weight 1. `values` f32[P, G, T] are those of `Objective.position`.
    """
    old = known_logprobs(rollouts.old_logprobs, jax.lax.stop_gradient(logprobs))
    rollouts = rollouts.replace(old_logprobs=old, behavior_logprobs=sampled_logprobs(rollouts, old))
    if CURRENT_ENTROPIES in objective.needs:
        rollouts = rollouts.replace(extras={**rollouts.extras, CURRENT_ENTROPIES: entropies})
    if values is not None:
        rollouts = rollouts.replace(extras={**rollouts.extras, POSITION: values})
    loss, (metrics, objective_state) = objective.update(logprobs, rollouts, advantages, objective_state)
    weights, mask = rollouts.loss_weights["token"], rollouts.token_mask
    metrics = mismatch(rollouts, old) | metrics | {"loss": loss, "entropy": masked.sum(entropies * weights, mask)}
    return loss, (jax.lax.stop_gradient(metrics), objective_state)


def forward(policy: Policy, params, lora, rollouts):
    """`(logprobs, entropies, loads | None)`, by which a loss is differentiated, and values of the policy's `position` if any.

    The loads are the experts', f32[P, L, E], see `models.moe`; None without experts.
    """
    if policy.model.config.experts is None and policy.position is None:
        return *policy.logprobs(params, lora, rollouts), None
    return policy.logprobs_and_loads(params, lora, rollouts)


def check_slopes(policy: Policy, objective: Objective) -> None:
    """Raises ValueError if a loss is to be differentiated by entropies, and those of the policy carry no gradient."""
    if CURRENT_ENTROPIES in objective.needs and not policy.slopes:
        raise ValueError("the objective has an entropy bonus, and the entropies of this policy carry no gradient; make it with "
                         "Policy(..., slopes=True)")


def losses(policy: Policy, objective: Objective, outputs, rollouts, advantages, objective_state):
    """As `loss_terms` of the outputs of `forward`; with experts, the objective's loss of their loads added."""
    check_slopes(policy, objective)
    logprobs, entropies, loads, *values = outputs
    value, (metrics, new) = loss_terms(objective, logprobs, entropies, rollouts, advantages, objective_state, *values)
    if loads is not None:
        chosen = jax.lax.stop_gradient(loads.chosen.sum(0))
        metrics |= {_CHOSEN: chosen}
        if objective.loads is not None:
            added, facts = objective.loads(loads, chosen, policy.model.config.experts.per_token, objective_state)
            value, metrics = value + added, metrics | facts
    return value, (metrics, new)


def whole_batch_cotangents(policy, objective, params, lora, micro_batches, rollouts, advantages, objective_state):
    """d loss / d outputs of `forward` for a loss that must see the whole mini-batch at once.

    One extra forward pass, micro-batch by micro-batch, gives the exact gradient with the memory of a micro-batch.
    """
    passed = in_parts(functools.partial(forward, policy), micro_batches)(params, lora, rollouts)
    differentiate = jax.value_and_grad(lambda outputs: losses(
        policy, objective, outputs, rollouts, advantages, objective_state), has_aux=True)
    (_, (metrics, state)), cotangents = differentiate(jax.lax.stop_gradient(passed))
    return cotangents, metrics, state


def live_first(mesh, rollouts, signal):
    """`(rollouts, signal)` with prompts whose signal `[P, ...]` is all zeros last, so that they share micro-batches.

    On several devices the order is kept: prompts would have to move between devices.
    """
    if mesh is not None and mesh.size > 1:
        return rollouts, signal
    dead = [(x == 0).all(range(1, x.ndim)) for x in jax.tree.leaves(signal)]
    order = jnp.argsort(functools.reduce(jnp.logical_and, dead), stable=True)
    return jax.tree.map(lambda x: x[order], (rollouts, signal))


def add_pulled_back(total, pull_back, cotangents):
    """`total + pull_back(cotangents)`, without the backward pass if all cotangents are 0, as for prompts without advantage.

    This is exact for every objective: a term beside the advantages (a KL, an entropy bonus) makes the cotangents nonzero.
    """
    def add(total):
        return jax.tree.map(jnp.add, total, pull_back(cotangents))
    alive = [(x != 0).any() for x in jax.tree.leaves(cotangents)]
    return jax.lax.cond(functools.reduce(jnp.logical_or, alive), add, lambda total: total, total)


def gradients(policy: Policy, objective: Objective, micro_batches: int, state: TrainState, rollouts, advantages):
    """Gradient of the mini-batch loss with respect to what is trained, plus metrics and the next objective state.

    Micro-batches are scanned and their gradients summed; the loss weights were computed for the whole mini-batch, so
    the sum is the gradient of the whole, whatever `micro_batches` is. Micro-batches whose log-probs do not affect the loss,
    such as those without any advantage, cost only a forward pass.
    """
    policy, rollouts = measuring(policy, objective), rollouts.replace(loss_weights=objective.weights(rollouts))
    place = functools.partial(with_trained, state.params, state.lora)
    terms = functools.partial(losses, policy, objective)
    if micro_batches == 1:
        def loss(tree):
            return terms(forward(policy, *place(tree), rollouts), rollouts, advantages, state.objective_state)

        (_, (metrics, objective_state)), total = jax.value_and_grad(loss, has_aux=True)(state.trainable)
        return total, metrics, objective_state

    zeros = jax.tree.map(jnp.zeros_like, state.trainable)
    if objective.whole_batch:
        cotangents, metrics, objective_state = whole_batch_cotangents(
            policy, objective, state.params, state.lora, micro_batches, rollouts, advantages, state.objective_state)

        def add_again(total, inputs):
            part, cotangent = inputs
            def loss(tree, c):
                return optax.tree.vdot(forward(policy, *place(tree), part), c)
            return add_pulled_back(total, functools.partial(jax.grad(loss), state.trainable), cotangent), None

        total, _ = jax.lax.scan(add_again, zeros, split(live_first(policy.mesh, rollouts, cotangents), micro_batches))
        return total, metrics, objective_state

    def add_part(carry, inputs):
        part, advantage = inputs
        outputs, pull_back = jax.vjp(lambda tree: forward(policy, *place(tree), part), state.trainable)
        def loss(outputs):
            return terms(outputs, part, advantage, state.objective_state)
        (_, (metrics, objective_state)), cotangents = jax.value_and_grad(loss, has_aux=True)(outputs)
        return (add_pulled_back(carry[0], lambda c: pull_back(c)[0], cotangents), objective_state), metrics

    (total, objective_state), metrics = jax.lax.scan(
        add_part, (zeros, state.objective_state), split(live_first(policy.mesh, rollouts, advantages), micro_batches))
    return total, merge_metrics(metrics), objective_state


def joint_gradients(policy: Policy, capture: Capture, objective: Objective, estimator: Estimator, state: TrainState, rollouts):
    """As `gradients` of an on-policy batch whose estimator reads features: one forward pass serves both.

    The advantages are computed from the features of this forward pass, before its backward pass. Returns
    `(gradient, metrics, objective_state, estimator_state)`; the metrics include the estimator's.
    """
    check_slopes(policy, objective)
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))

    def loss(tree):
        params, lora = with_trained(state.params, state.lora, tree)
        logprobs, entropies, features = policy.logprobs_and_features(params, lora, rollouts, capture)
        fixed = dict(zip(("old_logprobs", "entropies", "features"), jax.lax.stop_gradient((logprobs, entropies, features))))
        seen = rollouts.replace(**fixed)
        plain = without_apart(seen)
        advantages, estimator_state = estimator.update(plain, state.estimator_state)
        own = {} if estimator.metrics is None else estimator.metrics(plain, advantages, state.estimator_state)
        value, (metrics, objective_state) = loss_terms(objective, logprobs, entropies, seen, advantages, state.objective_state)
        return value, (metrics | own | {"advantages": advantages}, objective_state, estimator_state)

    (_, (*aux, estimator_state)), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    return gradient, *aux, keep_finite(estimator_state, state.estimator_state)


def advance(optimizer, clip_norm, mesh, state: TrainState, grads, metrics, objective_state, rate=None):
    """`(state, metrics)` after one optimiser step with `grads`, or after its refusal, see `make_update`.

    The metric `step_scale` of an objective is a factor of this step's learning rate.
    """
    if "step_scale" in metrics:
        rate = metrics["step_scale"] if rate is None else rate * metrics["step_scale"]
    if _CHOSEN in metrics:
        metrics = dict(metrics)
        metrics["moe/max_load"] = moe.max_load(metrics.pop(_CHOSEN))
    tree, opt_state, norm, finite = descend(
        optimizer, clip_norm, grads, metrics["loss"], state.trainable, state.opt_state, rate)
    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    skip = (~finite).astype(jnp.int32)
    state = state.with_trainable(tree).replace(
        opt_state=opt_state, objective_state=keep(objective_state, state.objective_state),
        skipped=state.skipped + skip, skipped_in_row=(state.skipped_in_row + 1) * skip)
    if mesh is not None:
        state = jax.lax.with_sharding_constraint(state, tree_shardings(state, mesh))
    return state, metrics | {"grad_norm": norm, "skipped_updates": state.skipped}


@remembered(8)
def make_update(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, *,
                clip_norm: float | None = 1.0, micro_batches: int = 1) -> Update:
    """The jitted update `(state, rollouts, advantages, rate=None) -> (state, metrics)`; the state is donated.

    The new state is sharded over the policy's mesh by the partition table, like the old one: otherwise the compiler might
    choose other layouts of the outputs, and the next call would recompile.

    The gradient is scaled to `clip_norm` if its global norm is larger. An update with a loss or gradient that is not finite
    leaves weights and optimiser unchanged and is counted in `state.skipped`. An update without any gradient (all advantages 0,
    nothing kept) also changes nothing, without being counted: momentum and weight decay alone must not move the weights. `rate`
    f32[] is a factor of the schedule's learning rate, to which every optimiser of `learning.optimizers` is proportional.
    Raises ValueError: at trace time, if `micro_batches` does not divide the prompts of a mini-batch.
    """

    def update(state: TrainState, rollouts: Rollouts, advantages: jax.Array, rate: jax.Array | None = None):
        P = rollouts.mask.shape[0]
        if P % micro_batches:
            raise ValueError(f"{P} prompts per mini-batch do not divide into learner.micro_batches={micro_batches}; "
                             f"choose one of {[n for n in range(1, P + 1) if P % n == 0]}")
        grads, metrics, objective_state = gradients(policy, objective, micro_batches, state, rollouts, advantages)
        return advance(optimizer, clip_norm, policy.mesh, state, grads, metrics, objective_state, rate)

    return jax.jit(update, donate_argnums=0)


@remembered(8)
def make_joint_update(policy: Policy, capture: Capture, objective: Objective, estimator: Estimator,
                      optimizer: optax.GradientTransformation, *, clip_norm: float | None = 1.0):
    """The jitted update `(state, rollouts, rate=None) -> (state, metrics)` that also estimates, see `joint_gradients`."""

    def update(state: TrainState, rollouts: Rollouts, rate: jax.Array | None = None):
        grads, metrics, objective_state, estimator_state = joint_gradients(
            policy, capture, objective, estimator, state, rollouts)
        return advance(optimizer, clip_norm, policy.mesh, state.replace(estimator_state=estimator_state), grads, metrics,
                       objective_state, rate)

    return jax.jit(update, donate_argnums=0)
