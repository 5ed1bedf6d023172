"""A critic: the value of every state along a completion, fitted to returns (PPO, arXiv 1707.06347).

V_t is the value of the state before token t: the prompt and the tokens up to t - 1. Two kinds:
  `separate`  a second transformer that starts from the policy's weights, all of it trained;
  `head`      one linear layer on the policy's own final states; no gradient reaches the policy.

    critic = Critic(model, optimizer)
    state = critic.init(params)
    rollouts = rollouts.replace(extras={"values": critic.values(state.params, policy, rollouts), "value_targets": ...})
    state, metrics = make_update(critic)(state, policy, rollouts)          # policy = (params, lora)
"""
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from jaxrl_llm.data.rollouts import Rollouts, clean
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.descent import descend, split
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.parallel import over_rows, tree_shardings
from jaxrl_llm.tools.memo import remembered

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

        r, (trunk, lora) = rollouts, policy if self.kind == "head" else (params["trunk"], None)
        rows = r.prompt_tokens, r.prompt_mask, r.tokens, r.token_mask
        values = over_rows(forward, self.mesh, self.model.dtype, trunk, (lora, params["head"]), rows)
        return jnp.where(r.token_mask, values, 0)


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
        values, weights = critic.values(params, policy, part), part.loss_weights["token"]
        loss, clipped = value_loss(values, part.extras["values"], part.extras["value_targets"], critic.clip)
        loss = (loss * weights).sum()
        return loss, {"value/loss": loss, "value/clip_fraction": (clipped * weights).sum()}

    def update(state: CriticState, policy, rollouts: Rollouts):
        rollouts = clean(rollouts, "values", "value_targets")
        parts = split(rollouts.replace(loss_weights={"token": token_weights(rollouts, "token_mean")}), micro_batches)

        def add(total, part):
            (_, terms), gradient = jax.value_and_grad(part_loss, has_aux=True)(state.params, policy, part)
            return jax.tree.map(jnp.add, total, gradient), terms

        gradient, terms = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state.params), parts)
        terms = jax.tree.map(jnp.sum, terms)
        params, opt_state, norm, finite = descend(
            critic.optimizer, clip_norm, gradient, terms["value/loss"], state.params, state.opt_state)
        state = CriticState(params, opt_state)
        if critic.mesh is not None:
            state = jax.lax.with_sharding_constraint(state, tree_shardings(state, critic.mesh))
        return state, terms | {"value/grad_norm": norm, "value/skipped": (~finite).astype(jnp.float32)}

    return jax.jit(update, donate_argnums=0)
