"""A critic of whole turns: twin values Q(s, a) of turns and V(s) of the text before them (ArCHer, arXiv 2402.19446).

A turn is one step. Its features are two states of the policy: s, just before its first token, and (s, a), after its last; the
heads are perceptrons of three layers on them. Slow copies of the heads, which follow by a share `tau`, give the targets:

    y_i = r + gamma (1 - done) slow V_i(s'),   u_i = slow Q_i(s, a),   loss = sum_i mean (Q_i - y_i)^2 + mean (V_i - u_i)^2

The turns of the batch are sampled by the policy whose value is learned, so a is a fresh turn for u_i.
"""
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh

from jaxrl_llm.data.packing import PackedRows
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import descend
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel import batch_sharding, indexed, over_rows, tree_shardings
from jaxrl_llm.values import critic as critic_lib

_TWINS, _LAYERS = 2, 3


class TurnCriticState(flax.struct.PyTreeNode):
    """`params` and their `slow` copies: `q` and `v`, each a tuple of layers (`weight` f32[2, in, out], `bias` f32[2, out])."""

    params: Any
    slow: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class TurnCritic:
    """A critic of turns as pure functions of its parameters.

    Attributes:
      model: the policy's transformer, whose states are read; no gradient reaches it.
      optimizer: optimiser of the heads.
      key: random key of their initial weights.
      gamma: discount per turn.  tau: share by which slow copies follow per epoch.  epochs: passes of a fit over its batch.
      clip_norm: largest norm of a gradient; None: any.
      mesh: mesh over which parameters and rollouts are sharded; None: one device.
    """

    model: Transformer
    optimizer: optax.GradientTransformation
    key: Array
    gamma: float = 0.95
    tau: float = 0.1
    epochs: int = 50
    clip_norm: float | None = 1.0
    mesh: Mesh | None = None

    def init(self, policy_params) -> TurnCriticState:
        """The state before the first fit, in which slow copies are equal to the heads."""
        width = self.model.config.hidden_size
        q, v = (_perceptron(key, inputs, width) for key, inputs in zip(jax.random.split(self.key), (2 * width, width)))
        params = {"q": q, "v": v}
        return TurnCriticState(params, jax.tree.map(jnp.copy, params), self.optimizer.init(params))

    def states(self, params, lora, rollouts: Rollouts) -> Array:
        """f32[P, G, K, 2, D]: the policy's state before the first token of each turn and after its last; 0 without a turn.

        Reads `step_ids` and `extras["step"]` i32[P, G, K].
        """
        def forward(params, lora, rows, whole):
            prompt_tokens, prompt_mask, tokens, places = rows
            longer = jnp.pad(tokens, ((0, 0), (0, 0), (0, 1)))  # the state behind the last token is the one before this slot
            states, _ = self.model.packed_states(params, prompt_tokens, prompt_mask, longer, lora=lora, whole=whole)
            P, G, K, _ = places.shape
            gathered = jnp.take_along_axis(states, places.reshape(P, G, 2 * K, 1), axis=2)
            return gathered.reshape(P, G, K, 2, -1).astype(jnp.float32)

        r = rollouts
        rows = r.prompt_tokens, r.prompt_mask, r.tokens, turn_places(r)
        states = over_rows(forward, self.mesh, self.model.dtype, params, lora, rows)
        return jnp.where(turns_of(r)[..., None, None], states, 0)

    def no_states(self, rollouts: Rollouts) -> Array:
        """What `with_packed` adds to first."""
        where = None if self.mesh is None else batch_sharding(self.mesh)
        return jnp.zeros((*rollouts.extras["step"].shape, 2, self.model.config.hidden_size), device=where)

    def with_packed(self, states: Array, params, lora, rollouts: Rollouts, rows: PackedRows, index: Array, start) -> Array:
        """`states` with those of the turns in a micro-batch of packed rows, whose first slot is `start` of the index."""
        def forward(params, others, rows, whole):
            (lora, ends), (rows, number) = others, rows
            states = self.model.tree_states(params, rows.tokens, rows.positions, rows.end, lora=lora, whole=whole,
                                            axis=indexed.cut_axis(self.mesh))
            return indexed.sums(states, number, N, ends)

        (R, N), (first, behind) = rows.tokens.shape, jnp.moveaxis(turn_places(rollouts), -1, 0)
        begin, last = (jnp.take_along_axis(index - start, jnp.maximum(at, 0), axis=2) for at in (first, behind - 1))
        ends = jnp.stack([indexed.before(rows.before, begin), last], axis=-1)
        ends = jnp.where(turns_of(rollouts)[..., None], ends, -1)[..., None]
        given = rows._replace(temperature=None, experts=None), indexed.numbered(R, N)
        more = over_rows(forward, self.mesh, self.model.dtype, params, (lora, ends), given, cut=True).sum((0, 1))
        return states + (more if self.mesh is None else lax.with_sharding_constraint(more, batch_sharding(self.mesh)))

    def fit(self, state: TurnCriticState, rollouts: Rollouts) -> tuple[TurnCriticState, dict[str, Array]]:
        """`epochs` updates on all turns of a batch with `extras["turn_states"]`; metrics are from the first one.

        Gradients that are not finite are refused, as in `learning.step.make_update`.
        """
        rewards, there, states = rollouts.extras["step_rewards"], turns_of(rollouts), rollouts.extras["turn_states"]
        last = there & ~jnp.pad(there[..., 1:], ((0, 0), (0, 0), (0, 1)))

        def loss_of(params, slow):
            q, v = values(params, states)
            slow_q, slow_v = values(slow, states)
            y, u = targets(rewards, last, behind(slow_v), slow_q, self.gamma)
            parts = losses(q, v, y, u, there)
            return sum(parts), dict(zip(("value/q_loss", "value/v_loss"), parts))

        def epoch(state, _):
            (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params, state.slow)
            params, opt_state, norm, finite = descend(self.optimizer, self.clip_norm, gradient, loss, state.params,
                                                      state.opt_state)
            slow = jax.tree.map(lambda old, new: old + self.tau * (new - old), state.slow, params)
            return TurnCriticState(params, slow, opt_state), metrics | {
                "value/grad_norm": norm, "value/skipped": (~finite).astype(jnp.float32)}

        returns = returns_of(rewards, there, self.gamma)
        known = critic_lib.metrics(values(state.params, states)[0].min(-1), returns, there)
        state, metrics = lax.scan(epoch, state, length=self.epochs)
        if self.mesh is not None:
            state = lax.with_sharding_constraint(state, tree_shardings(state, self.mesh))
        return state, known | {name: x.sum() if name == "value/skipped" else x[0] for name, x in metrics.items()}


def values(params, states: Array) -> tuple[Array, Array]:
    """Q and V, f32[P, G, K, 2] each, of states f32[P, G, K, 2, D]."""
    both = states.reshape(*states.shape[:-2], -1)
    return _apply(params["q"], both), _apply(params["v"], states[..., 0, :])


def targets(rewards: Array, done: Array, next_v: Array, slow_q: Array, gamma: float) -> tuple[Array, Array]:
    """`y = r + gamma (1 - done) slow V(s')` and `u = slow Q(s, a)`, without gradient: `[..., 2]` of turns `[...]`."""
    y = rewards[..., None] + gamma * jnp.where(done[..., None], 0, next_v)
    return lax.stop_gradient(y), lax.stop_gradient(slow_q)


def losses(q: Array, v: Array, y: Array, u: Array, there: Array) -> tuple[Array, Array]:
    """`sum_i mean (Q_i - y_i)^2` and `sum_i mean (V_i - u_i)^2` over the turns that are there."""
    return tuple(sum(masked.mean((x[..., i] - goal[..., i]) ** 2, there) for i in range(_TWINS))  # type: ignore[return-value]
                 for x, goal in ((q, y), (v, u)))


def behind(v: Array) -> Array:
    """The values of the next turn of the same trajectory, 0 after the last: `[P, G, K, 2]` shifted by one turn."""
    return jnp.pad(v[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))


def returns_of(rewards: Array, there: Array, gamma: float) -> Array:
    """f32[P, G, K]: `G_k = r_k + gamma G_{k+1}`, the observed return from each turn on."""
    def step(later, inputs):
        reward, real = inputs
        total = jnp.where(real, reward + gamma * later, 0)
        return total, total

    major = [jnp.moveaxis(x, -1, 0) for x in (rewards, there)]
    return jnp.moveaxis(lax.scan(step, jnp.zeros_like(rewards[..., 0]), tuple(major), reverse=True)[1], 0, -1)


def turns_of(rollouts: Rollouts) -> Array:
    """bool[P, G, K]: turns that exist."""
    return rollouts.valid[..., None] & (rollouts.extras["step"] >= 0)


def turn_places(rollouts: Rollouts) -> Array:
    """i32[P, G, K, 2]: the slot of a turn's first token, and the slot after its last; 0 where there is no turn."""
    K = rollouts.extras["step"].shape[-1]
    slot = jnp.arange(rollouts.mask.shape[-1])
    own = rollouts.token_mask[:, :, None] & (rollouts.step_ids[:, :, None] == jnp.arange(K)[:, None])
    first = jnp.where(own, slot, slot.size).min(-1)
    last = jnp.where(own, slot + 1, 0).max(-1)
    return jnp.stack([jnp.where(last > 0, first, 0), last], axis=-1).astype(jnp.int32)


def _perceptron(key: Array, inputs: int, width: int) -> tuple[dict[str, Array], ...]:
    """Layers of twin perceptrons with one output; weights are uniform, as in torch's `Linear`."""
    sizes, layers = [inputs, *[width] * (_LAYERS - 1), 1], []
    for key, before, after in zip(jax.random.split(key, _LAYERS), sizes, sizes[1:]):
        bound = before ** -0.5
        weight, bias = (jax.random.uniform(one, shape, minval=-bound, maxval=bound)
                        for one, shape in zip(jax.random.split(key), ((_TWINS, before, after), (_TWINS, after))))
        layers.append({"weight": weight, "bias": bias})
    return tuple(layers)


def _apply(layers, x: Array) -> Array:
    """f32[..., 2]: outputs of twin perceptrons for `x` f32[..., D]."""
    x = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], _TWINS, x.shape[-1]))
    for number, layer in enumerate(layers):
        x = jnp.einsum("...ti,tio->...to", jax.nn.relu(x) if number else x, layer["weight"]) + layer["bias"]
    return x[..., 0]
