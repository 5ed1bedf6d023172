"""POISE: a probe on the policy's own hidden states and entropies gives the baseline of its rollouts (arXiv 2605.07579).

The probe for a batch was fitted to earlier batches, and the baseline of a rollout uses the features of the OTHER rollouts of
its prompt. Given the prompt, rollouts are drawn independently, so the baseline is independent of its rollout, and
E[b_i grad log pi(y_i | x)] = E[b_i] E[grad log pi(y_i | x)] = 0: the gradient stays unbiased.
"""
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxrl_llm.maths import masked
from jaxrl_llm.values import buffer as buffers
from jaxrl_llm.values import probe as probes
from jaxrl_llm.values.base import Value


class PoiseState(struct.PyTreeNode):
    """The table that the probe is fitted to, the probe, and the number of informative batches so far.

    Rows of the buffer: `features f32[F]`, `label`, and, to evaluate the probe later, the `prediction` that it made before it
    saw the row, with `predicted`: whether there was one.
    """

    buffer: buffers.Buffer
    probe: Any
    steps: Array


def cross_rollout(x: Array, valid: Array) -> Array:
    """`b_i = mean over j != i of x_j` within each prompt, `[P, G]`; 0 where a prompt has fewer than two valid rollouts."""
    return jnp.where(valid & comparable(valid), masked.leave_one_out_mean(x, valid), 0.0)


def comparable(valid: Array) -> Array:
    """bool[P, 1]: prompts with at least two valid rollouts."""
    return masked.group_count(valid) > 1


def poise(*, feature_size: int, capacity: int = 4096, first_fit: int = 8, probe: str | Sequence[str] = "ridge",
          ensemble: str = "mean", alpha: float = 100.0, components: Sequence[int] | None = None, low: float = 0.0,
          high: float = 1.0) -> Value:
    """The value model: a probe refitted at every `observe`, from the `first_fit`-th on, to the last `capacity` rollouts.

    Args:
      feature_size: F = 2 D + 3, see `features.phi`.
      capacity: rows of the sliding window; the oldest prompts are evicted as whole groups.
      first_fit: batches to wait before the first fit.
      probe, ensemble, alpha, components, low, high: see `probe.make`; `components` are for prompt and completion states.
    Raises ValueError: see `probe.make`; sizes that do not fit two states and three entropies.
    """
    if feature_size < 5 or feature_size % 2 == 0:
        raise ValueError(f"feature_size={feature_size}; it is 2 D + 3 for states of width D, see values.features.phi")
    hidden = (feature_size - 3) // 2
    fitter = probes.make(probe, sizes=(hidden, hidden, 3), alpha=alpha, ensemble=ensemble, components=components, low=low,
                         high=high)

    def init():
        one = jax.ShapeDtypeStruct((), jnp.float32)
        row = {"features": jax.ShapeDtypeStruct((feature_size,), jnp.float32), "label": one, "prediction": one,
               "predicted": jax.ShapeDtypeStruct((), jnp.bool_)}
        return PoiseState(buffers.empty(capacity, row), fitter.blank(capacity, feature_size), jnp.zeros((), jnp.int32))

    def predict(state, features):
        rows = features.reshape(-1, features.shape[-1])
        return fitter.predict(state.probe, rows).reshape(features.shape[:-1])

    def observe(state, features, targets, valid):
        valid &= comparable(valid)
        rows = {"features": features, "label": targets, "prediction": predict(state, features),
                "predicted": jnp.broadcast_to(state.steps >= first_fit, valid.shape)}
        buffer = buffers.append(state.buffer, rows, valid)
        steps = state.steps + jnp.any(valid).astype(jnp.int32)
        table = buffer.rows["features"], buffer.rows["label"], buffer.real, buffer.group
        refit = (steps >= first_fit) & jnp.any(valid)
        fitted = jax.tree.map(lambda new, old: jnp.where(refit, new, old), fitter.fit(*table), state.probe)
        return PoiseState(buffer, fitted, steps)

    return Value(init, predict, observe)
