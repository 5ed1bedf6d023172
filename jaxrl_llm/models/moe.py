"""Mixtures of experts: a router sends each token to a few of many gated feed-forward layers (arXiv 1701.06538, 2401.04088).

No token is dropped and none waits for others: the output of a token depends on it alone, whatever the batch and its padding.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.kernels.grouped import grouped_matmul
from jaxrl_llm.models.config import Experts
from jaxrl_llm.models.unpadding import moved

SAVED = "experts"  # name of the products of experts, for a checkpoint policy
CHOSEN = "chosen experts"  # name of the choice of experts: recomputed from rounded numbers, another expert could win


class Router(nn.Module):
    """The experts of each token and their weights, softmax of `x @ kernel [D, E]` in float32.

    The collection `routing`, where it is mutable, receives `probs f32[..., E]` and `experts i32[..., k]` of the pass.
    """

    config: Experts

    @nn.compact
    def __call__(self, x, given=None):
        """`x [..., D]` -> `(weights f32[..., k], experts i32[..., k])`, the most probable first.

        `given i[..., k]`: experts to take instead, where they are not negative; their weights are still the router's
        (arXiv 2512.01374).
        """
        kernel = self.param("kernel", nn.initializers.normal(0.02), (x.shape[-1], self.config.count), jnp.float32)
        probs = jax.nn.softmax(x.astype(jnp.float32) @ kernel.astype(jnp.float32))
        experts = jax.lax.top_k(probs, self.config.per_token)[1]
        experts = checkpoint_name(experts if given is None else jnp.where(given >= 0, given, experts), CHOSEN)
        weights = jnp.take_along_axis(probs, experts, axis=-1)
        if self.config.normalize:
            weights /= weights.sum(-1, keepdims=True)
        if self.is_mutable_collection("routing"):
            self.put_variable("routing", "probs", probs)
            self.put_variable("routing", "experts", experts)
        return weights, experts


class Loads(NamedTuple):
    """The load of the experts, `f32[..., E]` each, see `loads`.

    chosen: tokens that each expert computes.  probs: sums of the probabilities that the router gave it.
    """

    chosen: jax.Array
    probs: jax.Array


def max_load(chosen: jax.Array) -> jax.Array:
    """The load of the busiest expert of any layer, divided by the balanced load: 1 to E / k, from tokens `[L, E]`."""
    return (chosen / jnp.maximum(chosen.mean(-1, keepdims=True), 1e-9)).max()


def loads(routing: dict, split: Callable, *masks) -> Loads:
    """The loads `f32[P, E]` of a packed layer's tokens, of each prompt with its completions or of each row.

    The counts cover the tokens that the update computes: each prompt once, and the completion tokens that predict another.

    Args:
      routing: `probs f32[..., E]` and `experts i32[..., k]` of the packed tokens, see `Router`.
      split: makes parts `[P, ..., E]` of arrays of packed tokens, as `[P, S, E]` and `[P, G, T, E]`.
      masks: of each part, `bool[P, ...]`, tokens that count.
    """
    probs = routing["probs"]
    chosen = jax.nn.one_hot(routing["experts"], probs.shape[-1]).sum(-2)

    def total(y):
        def flat(x, axes):
            return x.reshape(x.shape[0], -1, *x.shape[x.ndim - axes:])
        return sum(jnp.einsum("ps,pse->pe", flat(mask, 0), flat(part, 1)) for part, mask in zip(split(y), masks, strict=True))

    return Loads(total(chosen), total(probs))


class Kernels(nn.Module):
    """One matrix for each expert, `[E, in, out]`."""

    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self):
        return self.param("kernel", nn.initializers.normal(0.02), self.shape, jnp.float32)


def mixture(x, config: Experts, activation, dtype: Any, dense, by: str = "plain", given=None):
    """The mixture that replaces the feed-forward part of a layer; call it in the layer's `nn.compact` method.

    Args:
      x: `[..., D]`.
      config: how many experts there are and how large.
      activation: of the gates.
      dtype: of the products.
      dense: `dense(features, name)`, a linear layer, for the expert that all tokens share (Qwen2-MoE).
      by: the kernels that compute experts, see `kernels.choice`.
      given: experts of each token, see `Router`; None: the router chooses them.
    Returns:
      `[..., D]`: the weighted sum of the experts of each token.
    """
    D, (E, M) = x.shape[-1], (config.count, config.size)
    weights, experts = Router(config, name="router")(x, given)
    def kernels(name, *shape):
        return Kernels(shape, name=f"experts_{name}")().astype(dtype)
    gate, up, down = kernels("gate", E, D, M), kernels("up", E, D, M), kernels("down", E, M, D)
    def flat(y):
        return y.reshape(-1, y.shape[-1])
    out = sorted_experts(flat(x), flat(weights), flat(experts), gate, up, down, activation, by).reshape(x.shape)
    if not config.shared_size:
        return out
    shared = activation(dense(config.shared_size, "shared_gate")(x)) * dense(config.shared_size, "shared_up")(x)
    return out + nn.sigmoid(dense(1, "shared_weight")(x)) * dense(D, "shared_down")(shared)


def sorted_experts(x, weights, experts, gate, up, down, activation, by: str = "plain"):
    """As `all_experts`, but computes only the chosen ones: each token once for each of its experts, sorted by expert."""
    k = experts.shape[1]
    order = jnp.argsort(experts.reshape(-1))
    place = jnp.argsort(order)
    sizes = jnp.bincount(experts.reshape(-1), length=len(gate)).astype(jnp.int32)
    def times(rows, kernels):
        return checkpoint_name(grouped_matmul(rows, kernels, sizes, by), SAVED)
    rows = moved(jnp.repeat(x, k, axis=0), order, place)
    outputs = times(activation(times(rows, gate)) * times(rows, up), down)
    outputs = moved(outputs, place, order).reshape(*experts.shape, -1)
    return jnp.einsum("nk,nkd->nd", weights, outputs, preferred_element_type=jnp.float32).astype(x.dtype)


def all_experts(x, weights, experts, gate, up, down, activation):
    """The plain reference: every expert computes every token, and experts that were not chosen have weight 0.

    Args:
      x: `[n, D]`.
      weights, experts: `f32[n, k]`, `i32[n, k]`, see `Router`.
      gate, up, down: `[E, D, M]`, `[E, D, M]`, `[E, M, D]`.
      activation: of the gates.
    Returns:
      `[n, D]`: sum over a token's experts e of `weight_e * down_e(activation(gate_e x) * up_e x)`.
    """
    hidden = activation(jnp.einsum("nd,edm->enm", x, gate)) * jnp.einsum("nd,edm->enm", x, up)
    share = jnp.einsum("nk,nke->en", weights, jax.nn.one_hot(experts, len(gate)))
    return jnp.einsum("en,enm,emd->nd", share, hidden, down, preferred_element_type=jnp.float32).astype(x.dtype)
