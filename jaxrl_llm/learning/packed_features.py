"""Features of the policy's own states in packed rows: the view gathers the sums of states that lie in many rows.

Rows of a micro-batch may hold the end of a prompt, and others its completions. Sums over tokens add up over micro-batches, as
log-probs do; the averages are taken at the end.
"""
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import parallel
from jaxrl_llm.data.packing import Packed
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning import accumulate
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.tools.memo import remembered
from jaxrl_llm.values import features


class FeatureParts(NamedTuple):
    """The jitted parts of `Policy.logprobs_and_features` in packed rows, see `UpdateParts`.

    begin: `(rollouts, index, root) -> (last, view)`: the slots of the tokens whose states are averaged, and zeros to add to.
    add: `(view, params, lora, rows, index, start, last) -> view`, the first donated.
    finish: `(view, rollouts) -> (logprobs, entropies, features)`.
    """

    begin: Callable
    add: Callable
    finish: Callable


@remembered(8)
def make(policy: Policy, capture: Capture) -> FeatureParts:
    """The parts for states of one block; those of prompts without any trained token are 0."""

    def begin(rollouts, index, root):
        width, reasoning = policy.model.config.hidden_size, _spans(rollouts).reasoning
        last = features.last_tokens(reasoning, capture.pool)
        ends, _ = jax.lax.top_k(jnp.where(last, index, -1), min(capture.pool, index.shape[2]))
        order = jnp.arange(min(capture.pool, rollouts.prompt_mask.shape[1]))
        first, length = root.max(1)[:, None], rollouts.prompt_mask.sum(1, dtype=jnp.int32)[:, None]
        asked = jnp.where((first >= 0) & (order < length), first + length - 1 - order, -1)
        zeros = [jnp.zeros(shape) for shape in (index.shape, index.shape, (*asked.shape[:1], width), (*ends.shape[:2], width))]
        return (asked, ends), spread(tuple(zeros))

    def add(view, params, lora, rows, index, start, last):
        last = jax.tree.map(lambda slots: slots - start, last)
        logprobs, entropies, sums = policy.packed_features(params, lora, rows, index - start, last, capture.layer)
        return spread(jax.tree.map(jnp.add, view, (logprobs, entropies, *sums)))

    def finish(view, rollouts):
        logprobs, entropies, asked, answered = view
        spans = _spans(rollouts)
        counts = [jnp.maximum(features.last_tokens(mask, capture.pool).sum(-1, keepdims=True), 1)
                  for mask in (rollouts.prompt_mask, spans.reasoning)]
        means = features.mean_entropies(entropies, rollouts.token_mask, spans)
        return logprobs, entropies, features.phi(asked / counts[0], answered / counts[1], means)

    def _spans(rollouts):
        return features.spans(rollouts.tokens, rollouts.token_mask, capture.marker, capture.call)

    def spread(tree):
        return tree if policy.mesh is None else jax.lax.with_sharding_constraint(tree, parallel.batch_sharding(policy.mesh))

    return FeatureParts(jax.jit(begin), jax.jit(add, donate_argnums=0), jax.jit(finish))


def seen(parts: FeatureParts, policy: Policy, params, lora, rollouts: Rollouts, size: int, packed: Packed):
    """`(logprobs, entropies, features)` of all trajectories, from `size` packed rows at a time."""
    micro_batches, index = accumulate.placed(policy, size, packed)
    spread = None if policy.mesh is None else parallel.batch_sharding(policy.mesh)
    last, view = parts.begin(rollouts, index, parallel.put(packed.root, spread))
    for rows, start in micro_batches:
        view = parts.add(view, params, lora, rows, index, start, last)
    return parts.finish(view, rollouts)
