"""A critic: the value of every state along a completion, fitted to returns (PPO, arXiv 1707.06347).

V_t is the value of the state before token t: the prompt and the tokens up to t - 1. Two kinds:
  `separate`  a second transformer that starts from the policy's weights, all of it trained;
  `head`      one linear layer on the policy's own final states; no gradient reaches the policy.

    critic = Critic(model, optimizer)
    state = critic.init(params)
    rollouts = rollouts.replace(extras={"values": critic.values(state.params, policy, rollouts), "value_targets": ...})
    state, metrics = make_update(critic)(state, policy, rollouts)          # policy = (params, lora)

Packed rows have the same values and updates, see `in_packed_rows`; a micro-batch of them is a number of rows.
"""
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.data.packing import PackedRows
from jaxrl_llm.data.rollouts import Rollouts, clean
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import descend, split
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.parallel import batch_sharding, indexed, over_rows, tree_shardings
from jaxrl_llm.tools import key_values
from jaxrl_llm.tools.memo import remembered
from jaxrl_llm.tools.registry import Conflict

KINDS = ("separate", "head")


class CriticState(flax.struct.PyTreeNode):
    """`params`: `head` = (`weight` f32[D], `bias` f32[]) and, in a separate critic, the transformer's tree as `trunk`."""

    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Critic:
    """A critic as pure functions of its parameters.

    Attributes:
      model: the policy's transformer; a separate critic has the same architecture.
      optimizer: optimiser of everything in `CriticState.params`.
      kind: one of `KINDS`.
      clip: largest change of a value from the recorded one that a batch may cause (see `value_loss`); None: any.
      mesh: mesh over which parameters and rollouts are sharded; None: one device.
    """

    model: Transformer
    optimizer: optax.GradientTransformation
    kind: str = "separate"
    clip: float | None = 0.5
    mesh: Mesh | None = None

    def init(self, policy_params) -> CriticState:
        """The state before the first fit: every value is 0, a separate critic has copies of the policy's weights."""
        params = {"head": {"weight": jnp.zeros(self.model.config.hidden_size), "bias": jnp.zeros(())}}
        if self.kind == "separate":
            trunk = {name: tree for name, tree in policy_params.items() if name != "unembed"}
            params["trunk"] = jax.tree.map(jnp.copy, trunk)
        return CriticState(params, self.optimizer.init(params))

    def values(self, params, policy: tuple[Any, Any], rollouts: Rollouts) -> Array:
        """V_t f32[P, G, T], 0 outside the mask. `policy` = (parameters, adapters or None) is read by the kind `head` only."""
        def forward(trunk, others, rows, whole):
            (lora, head), (prompt_tokens, prompt_mask, tokens, mask) = others, rows
            states, _ = self.model.packed_states(trunk, prompt_tokens, prompt_mask, tokens, mask=mask, filled=r.filled,
                                                 lora=lora, whole=whole)
            return states.astype(jnp.float32) @ head["weight"] + head["bias"]

        r, (trunk, lora) = rollouts, self._trunk(params, policy)
        rows = r.prompt_tokens, r.prompt_mask, r.tokens, r.token_mask
        values = over_rows(forward, self.mesh, self.model.dtype, trunk, (lora, params["head"]), rows)
        return jnp.where(r.token_mask, values, 0)

    def packed_values(self, params, policy: tuple[Any, Any], rows: PackedRows, index: Array) -> Array:
        """As `values`, of the tokens that an index `i32[P, G, T]` names in these rows, see `Policy.packed_logprobs`."""
        def forward(trunk, others, rows, whole):
            lora, head = others
            states = self.model.tree_states(trunk, rows.tokens, rows.positions, rows.end, lora=lora, whole=whole, axis=axis)
            values = states.astype(jnp.float32) @ head["weight"] + head["bias"]
            if axis is not None:  # the state that predicts a token may be on another device
                values = jax.lax.all_gather(values, axis, axis=1, tiled=True)
            return jnp.take_along_axis(values, rows.before, axis=1)

        axis, (trunk, lora) = indexed.cut_axis(self.mesh), self._trunk(params, policy)
        rows = rows._replace(temperature=None, experts=None)
        values = over_rows(forward, self.mesh, self.model.dtype, trunk, (lora, params["head"]), rows, cut=True)
        return indexed.seen(values, index)

    def _trunk(self, params, policy: tuple[Any, Any]) -> tuple[Any, Any]:
        """Parameters and adapters of the transformer whose states are read."""
        return policy if self.kind == "head" else (params["trunk"], None)


def value_loss(values: Array, old_values: Array, targets: Array, clip: float | None) -> tuple[Array, Array]:
    """`max((V - R)^2, (V_c - R)^2) / 2`, `V_c = V_old + clip(V - V_old, -clip, clip)`, per token, and where V_c decides.

    There the gradient is 0: this batch does not pull a value further that left the range towards its target.
    """
    loss = (values - targets) ** 2 / 2
    if clip is None:
        return loss, jnp.zeros(loss.shape, bool)
    near = jax.lax.stop_gradient(old_values + jnp.clip(values - old_values, -clip, clip))
    bound = (near - targets) ** 2 / 2
    clipped = (jnp.abs(values - old_values) > clip) & (bound > loss)
    return jnp.where(clipped, bound, loss), clipped


def metrics(values: Array, returns: Array, mask: Array) -> dict[str, Array]:
    """Means of V and R over the tokens of `mask`, and `value/explained_variance` = `1 - var(R - V) / var(R)`.

    It is 1 for perfect values and 0 for values no better than a constant, or if R is constant: if its standard deviation is
    below 1e-5 of the root mean square of R and V, which is rounding, since R is often V plus a correction.
    """
    spread = masked.var(returns, mask, ddof=0)
    varies = spread > 1e-10 * masked.mean(returns**2 + values**2, mask)
    left = masked.var(returns - values, mask, ddof=0) / jnp.where(varies, spread, 1)
    return {"value/mean": masked.mean(values, mask), "value/return": masked.mean(returns, mask),
            "value/explained_variance": jnp.where(varies, 1 - left, 0)}


@remembered(8)
def make_update(critic: Critic, *, clip_norm: float | None = 1.0, micro_batches: int = 1
                ) -> Callable[[CriticState, tuple[Any, Any], Rollouts], tuple[CriticState, dict[str, Array]]]:
    """The jitted update `(state, policy, rollouts) -> (state, metrics)` on the mean of `value_loss` over all tokens.

    Reads `extras["values"]` (recorded when the rollouts were made) and `extras["value_targets"]`; the state is donated.
    Micro-batches, `clip_norm` and the refusal of gradients that are not finite work as in
    `learning.step.make_update`; `value/skipped` is 1 for a refused update.
    """

    def part_loss(params, policy, part):
        return _mean_loss(critic, critic.values(params, policy, part), part, part.loss_weights["token"])

    def update(state: CriticState, policy, rollouts: Rollouts):
        parts = split(_weighed(rollouts), micro_batches)

        def add(total, part):
            (_, terms), gradient = jax.value_and_grad(part_loss, has_aux=True)(state.params, policy, part)
            return jax.tree.map(jnp.add, total, gradient), terms

        gradient, terms = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), parts)
        return _stepped(critic, clip_norm, state, gradient, jax.tree.map(jnp.sum, terms))

    return jax.jit(update, donate_argnums=0)


class PackedCritic(NamedTuple):
    """The jitted parts of a critic in packed rows. `rows` are those of a micro-batch, whose first slot is `start`.

    values: `(view, params, policy, rows, index, start) -> view` f32[P, G, T], the first donated.
    begin: `(params, rollouts) -> ((gradient, terms), rollouts)`, zeros to add to, and what `add` reads of a mini-batch.
    add: `(total, params, policy, rollouts, rows, index, start) -> total`, the first donated.
    finish: `(state, total) -> (state, metrics)`, the state donated.
    """

    values: Callable
    begin: Callable
    add: Callable
    finish: Callable


@remembered(8)
def make_packed(critic: Critic, *, clip_norm: float | None = 1.0) -> PackedCritic:
    """The parts of `in_packed_rows`."""

    def values(view, params, policy, rows, index, start):
        view = view + critic.packed_values(params, policy, rows, index - start)
        return view if critic.mesh is None else jax.lax.with_sharding_constraint(view, batch_sharding(critic.mesh))

    def begin(params, rollouts):
        zeros = jax.tree.map(jnp.zeros_like, params), dict.fromkeys(("value/loss", "value/clip_fraction"), jnp.zeros(()))
        return _laid(critic, zeros), _weighed(rollouts)

    def add(total, params, policy, rollouts, rows, index, start):
        def loss(params):
            weights = jnp.where(indexed.inside(index - start, rows.tokens.size), rollouts.loss_weights["token"], 0)
            return _mean_loss(critic, critic.packed_values(params, policy, rows, index - start), rollouts, weights)

        (_, terms), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return _laid(critic, jax.tree.map(jnp.add, total, (gradient, terms)))

    def finish(state, total):
        return _stepped(critic, clip_norm, state, *total)

    return PackedCritic(jax.jit(values, donate_argnums=0), jax.jit(begin), jax.jit(add, donate_argnums=0),
                        jax.jit(finish, donate_argnums=0))


def in_packed_rows(parts: PackedCritic, placed: Callable) -> tuple[Callable, Callable]:
    """The functions of `Critic.values` and `make_update` in packed rows; `placed(rollouts)` as of `learning.layouts.Layout`."""

    def values(params, policy, rollouts):
        micro_batches, index = placed(rollouts)
        view = jnp.zeros_like(index, jnp.float32)
        for rows, start in micro_batches:
            view = parts.values(view, params, policy, rows, index, start)
        return view

    def update(state, policy, rollouts):
        micro_batches, index = placed(rollouts)
        total, rollouts = parts.begin(state.params, rollouts)
        for rows, start in micro_batches:
            total = parts.add(total, state.params, policy, rollouts, rows, index, start)
        return parts.finish(state, total)

    return values, update


def _weighed(rollouts: Rollouts) -> Rollouts:
    """The rollouts with finite targets, and weights of the mean over all their tokens."""
    rollouts = clean(rollouts, "values", "value_targets")
    return rollouts.replace(loss_weights={"token": token_weights(rollouts, "token_mean")})


def _mean_loss(critic: Critic, values: Array, rollouts: Rollouts, weights: Array) -> tuple[Array, dict[str, Array]]:
    """The sum of `value_loss` with these weights, and its metrics."""
    loss, clipped = value_loss(values, rollouts.extras["values"], rollouts.extras["value_targets"], critic.clip)
    loss = (loss * weights).sum()
    return loss, {"value/loss": loss, "value/clip_fraction": (clipped * weights).sum()}


def _stepped(critic: Critic, clip_norm: float | None, state: CriticState, gradient, terms: dict[str, Array]
             ) -> tuple[CriticState, dict[str, Array]]:
    """The state after a step of the optimiser, and the metrics."""
    params, opt_state, norm, finite = descend(
        critic.optimizer, clip_norm, gradient, terms["value/loss"], state.params, state.opt_state)
    state = _laid(critic, CriticState(params, opt_state))
    return state, terms | {"value/grad_norm": norm, "value/skipped": (~finite).astype(jnp.float32)}


def _laid(critic: Critic, tree):
    """A tree of the critic's parameters with the shardings of the partition table."""
    return tree if critic.mesh is None else jax.lax.with_sharding_constraint(tree, tree_shardings(tree, critic.mesh))


CONFLICTS = (
    Conflict(("estimator.has_critic", "config.critic.pretrain_steps", "config.steps"),
             "config.critic.pretrain_steps={1} leave none of the {2} steps to the policy", "set fewer (0: none), or more steps",
             lambda critic, alone, steps: critic and alone >= steps),)


def keys(c: ConfigDict) -> None:
    """Critics."""
    c.critic = ConfigDict()            # methods with a value of each state
    c.critic.kind = "separate"         # "separate": a model initialised from the policy; "head": a layer on the policy's states
    c.critic.learning_rate = 0.0       # learning rate of the critic; 0: the policy's
    c.critic.clip = 0.5                # value clipping: largest change of a value in a batch that lowers its loss; 0: off
    c.critic.pretrain_steps = -1       # first steps that train only the critic; -1: the method's own


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 0, "critic.learning_rate critic.clip critic.pretrain_steps")
    yield from key_values.finite(config, "critic.learning_rate")
    yield from key_values.named(config, "critic.kind", KINDS)
