"""From logits to one sampled token per row: temperature, top-k, top-p, min-p, and the exact log-prob of the draw."""
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.vocabulary import in_blocks
from jaxrl_llm.tools.registry import Conflict

RAREST = 0.7  # smallest share of its probability that a token keeps when draws are spread out: 1 - eps of PROPS
OFF: dict[str, Any] = {"top_k": np.int32(2**31 - 1), "top_p": np.float32("inf"), "min_p": np.float32(0)}  # drop no token
_BLOCKS = 256, 128  # widths of the second level of the inverse-CDF draw; any value gives the same distribution

Number = jax.Array | np.number | float


class Sampling(flax.struct.PyTreeNode):
    """The distribution of tokens, and the length limit. Values are traced, so changing one never compiles again.

    Each is one number for all rows; in `draw` also an array `[N]`, one for each row.

    Attributes:
      temperature: divides the logits; 0 means greedy.
      top_k: keep the k most likely tokens (ties with the k-th are kept); `None`: off.
      top_p: keep the smallest set of most likely tokens whose mass reaches p (arXiv 1904.09751); `None`: off.
      min_p: drop tokens less likely than `min_p` times the most likely one (arXiv 2407.01082); `None`: off.
      max_tokens: end completions after this number of tokens, without counting as stopped; `None`: at the length compiled for.
      spread: one number, how strongly first tokens avoid those drawn before in their group, see `spread_out`; 0: off.
    """

    temperature: Number = 1.0
    top_k: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    max_tokens: jax.Array | np.integer | int | None = None
    spread: Number | None = None


class Draw(NamedTuple):
    """One draw per row: `token i32[N]`, its `logprob f32[N]` and the `entropy f32[N]` (nats) of what it was drawn from."""

    token: jax.Array
    logprob: jax.Array
    entropy: jax.Array


def spread_out(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> Draw:
    """Draws for groups `[P, G]`, each in a single state, one row after another (PROPS, arXiv 2311.08290).

    Row g is drawn from `p max(exp(-spread (c / g - p)), RAREST)`, normalised: p are the probabilities of its `logits f32[P, V]`
    after restriction, c counts how often the g rows before it drew each token. Over many groups every token still occurs about
    as often as p says, and within each group its frequency is closer to p. Log-probs and entropies are those of the adjusted
    distribution.

    Args:
      keys: typed PRNG keys `[P, G]`.
    """
    logp = jax.nn.log_softmax(restrict(logits.astype(jnp.float32), sampling), axis=-1)
    plain = Sampling(jnp.where(jnp.asarray(sampling.temperature) == 0, 0.0, 1.0))

    def row(carry, key):
        counts, before = carry
        tilt = -jnp.asarray(sampling.spread) * (counts / jnp.maximum(before, 1) - jnp.exp(logp))
        tilted = logp + jnp.where(before > 0, jnp.maximum(tilt, np.log(RAREST)), 0)
        drawn = draw(key, tilted, plain)
        return (counts + jax.nn.one_hot(drawn.token, counts.shape[-1]), before + 1), drawn

    by_row = keys[jnp.arange(keys.shape[0]), jnp.arange(keys.shape[1])[:, None]]  # [G, P]
    _, drawn = jax.lax.scan(row, (jnp.zeros_like(logp), jnp.float32(0)), by_row)
    return jax.tree.map(lambda x: x.T.reshape(-1), drawn)


def check(sampling: Sampling) -> None:
    """Raises ValueError for values outside their range (host-side: call before tracing)."""
    if not sampling.temperature >= 0:
        raise ValueError(f"temperature={sampling.temperature}: must be >= 0 (0 is greedy)")
    if sampling.spread is not None and not sampling.spread >= 0:
        raise ValueError(f"spread={sampling.spread}: must be >= 0 (0 draws as usual)")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens}: must be >= 1")
    if sampling.top_k is not None and not 1 <= sampling.top_k < 2**31:
        raise ValueError(f"top_k={sampling.top_k}: must be from 1 to 2^31 - 1, or None to switch it off")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p={sampling.top_p}: must lie in (0, 1], or None to switch it off")
    if sampling.min_p is not None and not 0 <= sampling.min_p < 1:
        raise ValueError(f"min_p={sampling.min_p}: must lie in [0, 1), or None to switch it off")


def restrict(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits `f32[N, V]` of the distribution actually sampled from: tempered, with dropped tokens at -inf."""
    temperature = _column(sampling.temperature)
    logits = logits / jnp.where(temperature == 0, 1.0, temperature)
    if sampling.top_k is not None or sampling.top_p is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        if sampling.top_k is not None:
            kth = jnp.minimum(_column(sampling.top_k), logits.shape[-1]) - 1
            logits = jnp.where(logits < jnp.take_along_axis(ranked, kth, axis=-1), -jnp.inf, logits)
            ranked = jnp.where(jnp.arange(ranked.shape[-1]) > kth, -jnp.inf, ranked)
        if sampling.top_p is not None:
            probs = jax.nn.softmax(ranked, axis=-1)
            inside = jnp.cumsum(probs, axis=-1) - probs < _column(sampling.top_p)
            threshold = jnp.min(jnp.where(inside, ranked, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.min_p is not None:
        floor = logits.max(-1, keepdims=True) + jnp.log(_column(sampling.min_p))
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    return logits


def _column(value: Number | np.integer) -> jax.Array:
    """One number, or one for each row, as `[1, 1]` or `[N, 1]`."""
    return jnp.reshape(jnp.asarray(value), (-1, 1))


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index drawn with probability proportional to `weights f32[N, W]`, from `uniform f32[N]` in [0, 1)."""
    cumulative, possible = jnp.cumsum(weights, axis=-1), weights > 0
    # Parallel sums may round up at a weight of zero, and u * total up to the total: neither may pick an impossible index.
    reached = possible & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last_possible = weights.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(reached.any(-1), jnp.argmax(reached, axis=-1), last_possible).astype(jnp.int32)


def draw(keys: jax.Array, logits: jax.Array, sampling: Sampling) -> Draw:
    """Draws one token per row.

    The draw is by inverse CDF in two levels (a block of the vocabulary, then a token in it), each with its own uniform: two
    random numbers per row instead of V, and a resolution of 2^-46. Greedy draws (temperature 0) report log-prob and entropy of
    the softmax at temperature 1.

    Args:
      keys: typed PRNG keys `[N]`, one per row, so that a row's draw does not depend on its neighbours.
      logits: `f32[N, V]`.
      sampling: the distribution.
    """
    chex.assert_rank(logits, 2)
    logits = restrict(logits.astype(jnp.float32), sampling)
    width = next((size for size in _BLOCKS if logits.shape[1] % size == 0), _BLOCKS[0])  # filling up would copy the logits
    blocks, tops, top, masses, spreads = in_blocks(logits, width)
    total = masses.sum(-1)
    greedy = jnp.asarray(sampling.temperature) == 0
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = jnp.where(greedy, jnp.argmax(tops, axis=0), inverse_cdf(masses, uniforms[:, 0]))
    chosen = blocks[block, :, jnp.arange(len(logits))] - top[:, None]
    within = jnp.where(greedy, jnp.argmax(chosen, axis=1), inverse_cdf(jnp.exp(chosen), uniforms[:, 1]))
    token = (block * width + within).astype(jnp.int32)
    logprob = jnp.take_along_axis(chosen, within[:, None], axis=1)[:, 0] - jnp.log(total)
    entropy = jnp.log(total) - spreads.sum(-1) / total
    return Draw(token, logprob, entropy)


CONFLICTS = (
    Conflict(("needs.behavior_logprobs", "config.sampling.top_k", "config.sampling.top_p", "config.sampling.min_p"),
             "method {method!r} weighs tokens by learner over sampler probability, and top_k, top_p and min_p change only the "
             "latter", "switch them off (0, 1, 0)", lambda needed, top_k, top_p, min_p: top_k or top_p < 1 or min_p),)
