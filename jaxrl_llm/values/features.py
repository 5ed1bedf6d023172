"""Features of a rollout from the policy's own forward pass: pooled hidden states, mean entropies (POISE, arXiv 2605.07579).

Works on plain arrays of any model: residual streams of one block `[..., N, D]`, token ids, masks, entropies.
"""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.maths import masked


class Spans(NamedTuple):
    """Parts of completions, `bool[P, G, T]` each.

    reasoning: up to and including the last end-of-thinking marker; all of a completion without one.
    thinking: the same without the marker.  answer: what follows the marker; nothing without one.
    """

    reasoning: Array
    thinking: Array
    answer: Array


def feature_size(hidden_size: int) -> int:
    """Length of `phi`: two pooled states and three entropies, 2 D + 3."""
    return 2 * hidden_size + 3


def layer_index(layer: int | float, num_layers: int) -> int:
    """Index from 0 of the block whose output is read: an index (negative from the end), or a float, a share of the depth.

    A share f means that round(f L) blocks are applied, at least one: 0.55 of 36 blocks is block 19. Raises ValueError: there is
    no such block.
    """
    if isinstance(layer, float):
        if not 0 < layer <= 1:
            raise ValueError(f"layer={layer} as a share of the depth must be above 0 and at most 1")
        return max(int(layer * num_layers + 0.5), 1) - 1
    if not -num_layers <= layer < num_layers:
        raise ValueError(f"layer={layer} of a model with {num_layers} layers; give {-num_layers} to {num_layers - 1}, or a "
                         "share of the depth such as 0.55")
    return layer % num_layers


def last_tokens(mask: Array, n: int) -> Array:
    """True on the last `n` True entries of each row of `mask bool[..., N]`, or on all if there are fewer."""
    from_the_end = jnp.flip(jnp.cumsum(jnp.flip(mask, -1), axis=-1, dtype=jnp.int32), -1)
    return mask & (from_the_end <= n)


def pooled(states: Array, span: Array) -> Array:
    """Mean of `states [..., N, D]` over `span bool[..., N]` in float32: `[..., D]`; zeros where the span is empty."""
    total = jnp.sum(jnp.where(span[..., None], states.astype(jnp.float32), 0.0), axis=-2)
    return total / jnp.maximum(jnp.sum(span, axis=-1, dtype=jnp.float32), 1.0)[..., None]


def spans(tokens: Array, mask: Array, marker: Sequence[int], call: tuple[Sequence[int], Sequence[int]] = ((), ())) -> Spans:
    """The `Spans` of completions `tokens i32[..., T]`, `mask bool[..., T]` for an end-of-thinking marker given as token ids.

    The marker must be consecutive tokens inside the mask; its last occurrence decides. An empty marker occurs nowhere. What a
    call quotes does not count: a marker between the mark that opens a call and the next one, which closes it (`call`).
    """
    position = jnp.arange(tokens.shape[-1]).reshape((1,) * (tokens.ndim - 1) + (-1,))
    starts, opens, closes = (_places(tokens, mask, ids) for ids in (marker, *call))
    axis = tokens.ndim - 1
    before = [lax.cummax(jnp.where(found, position, -1), axis) for found in (opens, closes)]
    after = [lax.cummin(jnp.where(found, position, position.size), axis, reverse=True) for found in (opens, closes)]
    starts &= (before[0] <= before[1]) | (after[0] <= after[1])
    begin = jnp.max(jnp.where(starts, position, -1), axis=-1, keepdims=True)  # -1: no marker
    has_marker, size = begin >= 0, len(marker)
    return Spans(mask & (~has_marker | (position < begin + size)), mask & (~has_marker | (position < begin)),
                 mask & has_marker & (position >= begin + size))


def _places(tokens: Array, mask: Array, ids: Sequence[int]) -> Array:
    """bool[..., T]: where these ids, at least one, begin inside the mask."""
    width = tokens.shape[-1] - len(ids) + 1
    if not ids or width < 1:
        return jnp.zeros(tokens.shape, bool)
    found = jnp.ones((*tokens.shape[:-1], width), bool)
    for offset, token in enumerate(ids):
        stretch = slice(offset, width + offset)
        found &= mask[..., stretch] & (tokens[..., stretch] == token)
    return jnp.pad(found, [(0, 0)] * (tokens.ndim - 1) + [(0, len(ids) - 1)])


def mean_entropies(entropies: Array, mask: Array, parts: Spans) -> Array:
    """Mean token entropy over the completion, its thinking and its answer: `[..., 3]` nats, 0 for an empty part."""
    return jnp.stack([masked.mean(entropies, part, axis=-1) for part in (mask, parts.thinking, parts.answer)], axis=-1)


def phi(prompt_state: Array, completion_state: Array, entropies: Array) -> Array:
    """`phi = [h_prompt; h_completion; u]`, `f32[P, G, 2D + 3]`, from `[P, D]`, `[P, G, D]` and `[P, G, 3]`."""
    prompt = jnp.broadcast_to(prompt_state[:, None], completion_state.shape)
    return jnp.concatenate([prompt, completion_state, entropies.astype(completion_state.dtype)], axis=-1)
