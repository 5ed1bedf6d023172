"""Pass@k training: a set of k completions is rewarded by its best one, and passes its advantage on (arXiv 2508.10751)."""
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import draws, masked
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.ranges import Range
from jaxrl_llm.tools.registry import Conflict


def all_sets(rewards: Array, valid: Array, k: int, eps: float) -> Array:
    """f[P, G]: the mean advantage of the sets that a rollout is in, over all sets of k of the prompt's valid rollouts.

    Of the best reward of a set, the mean m and the deviation s over all sets, and the mean m_i over the sets that rollout i is
    in, `A_i = (m_i - m) / (s + eps)`. Of n sorted rewards, a share C(j, k) / C(n, k) of all sets has none above the j-th; of
    the sets of a rollout at or below the j-th, a share C(j-1, k-1) / C(n-1, k-1).
    """
    order = jnp.argsort(jnp.where(valid, rewards, jnp.inf), axis=1)
    there = jnp.take_along_axis(valid, order, axis=1)
    best = masked.max(rewards, valid, axis=1, initial=-jnp.inf)[:, None]
    gap = jnp.where(there, best - jnp.take_along_axis(rewards, order, axis=1), 0)  # to the best one of all
    higher = jnp.roll(gap, -1, axis=1).at[:, -1].set(0)  # the gap of the next place
    place = jnp.arange(1, valid.shape[1] + 1, dtype=rewards.dtype)[None]
    n = masked.group_count(valid).astype(rewards.dtype)
    missed = jnp.sum(_share(place, n, k) * (gap - higher), axis=1, keepdims=True)
    variance = jnp.sum(_share(place, n, k) * (gap**2 - higher**2), axis=1, keepdims=True) - missed**2
    deviation = jnp.sqrt(jnp.maximum(variance, 0))
    own = jnp.flip(jnp.cumsum(jnp.flip(_share(place - 1, n - 1, k - 1) * (gap - higher), 1), axis=1), 1)
    values = _scaled(missed - own, deviation, eps)
    return jnp.take_along_axis(values, jnp.argsort(order, axis=1), axis=1)


def _share(m: Array, n: Array, k: int) -> Array:
    """`C(m, k) / C(n, k)` for whole numbers m <= n in float; 1 for k = 0."""
    drawn = jnp.arange(k, dtype=m.dtype)[None, None]
    return jnp.prod(jnp.maximum(m[..., None] - drawn, 0) / jnp.maximum(n[..., None] - drawn, 1), axis=-1)


def _scaled(centred: Array, deviation: Array, eps: float) -> Array:
    """`centred / (deviation + eps)`; 0 where all are alike, also with an eps of 0."""
    return centred / jnp.where(deviation + eps > 0, deviation + eps, 1)


def _z_score(x: Array, real: Array, eps: float) -> Array:
    return _scaled(x - masked.group_mean(x, real), masked.group_std(x, real, ddof=0), eps)


def of_members(rewards: Array, member: Array, real: Array, eps: float) -> Array:
    """f[P, G]: the sum of the advantages of the sets that a rollout is in.

    `member` bool[P, M, G] says which rollouts each of M sets has, `real` bool[P, M] which sets exist. The advantage of a set is
    the z-score of its best reward among the sets, with the deviation of all of them (divisor M).
    """
    best = masked.max(jnp.broadcast_to(rewards[:, None], member.shape), member, axis=2, initial=-jnp.inf)
    scores = _z_score(jnp.where(real, best, 0), real, eps)
    return jnp.sum(jnp.where(member & real[..., None], scores[..., None], 0), axis=1)


def drawn_sets(key: Array, valid: Array, k: int) -> Array:
    """bool[P, G, G]: for each rollout a set of k different valid rollouts of its prompt, drawn at random."""
    P, G = valid.shape
    scores = jnp.where(valid[:, None], draws.uniform(key, (P, G, G)), jnp.inf)
    return (jnp.argsort(jnp.argsort(scores, axis=-1), axis=-1) < k) & valid[:, None]


def split_sets(valid: Array, k: int) -> Array:
    """bool[P, G, G]: neighbours, k at a time, of the valid rollouts of a prompt; the last n mod k are in no set."""
    place = jnp.cumsum(valid, axis=1) - 1
    whole = valid & (place < (jnp.sum(valid, axis=1, keepdims=True) // k) * k)
    return ((place // k)[:, None] == jnp.arange(valid.shape[1])[None, :, None]) & whole[:, None]


def _silent(group: int, most: int, sizes: list[str], made: Estimator) -> bool:
    """Whether all advantages of a group of this size are 0, whatever number of its rewards is 1 and not 0."""
    size = max(group, most) if sizes else group
    there = np.ones((size, size, 1), bool)
    fields: dict[str, Any] = {"mask": there, "valid": there[..., 0], "rewards": np.tri(size, dtype=np.float32)}
    return made.needs == ("rewards",) and not np.any(made.update(Rollouts(**fields), made.init())[0])


_TOO_FEW = Conflict(
    ("config.sampling.group", "config.sampling.max_group", "sizes", "estimator"),
    "{part} compares sets of k completions, and sampling.group={0} of a prompt make no two sets that differ",
    "give more of them, or a smaller k, as in config.estimator=\"k=2\"", _silent)


@estimator(conflicts=(_TOO_FEW,), ranges={"k": Range(1)})
def pass_at_k(*, k: int = 4, sets: str = "all", combine: bool = False, eps: float = 1e-6, seed: int = 0) -> Estimator:
    """The advantage of a completion is that of the sets of k completions that it is in; the best reward of a set is its reward.

    `sets`, of the n valid rollouts of a prompt:

    - `all`, the analytic form: every set of k, `A_i` the mean over the sets of i. With 0/1 rewards, c of them 1, the share of
      sets with a success is `R = 1 - C(n-c, k) / C(n, k)`. With `s = sqrt(R (1 - R))` a success has `A = (1 - R) / (s + eps)`,
      a failure `A = (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / (s + eps)`. Other rewards have the same means over sets, see
      `all_sets`; the authors' code has 0 and 1 alone.
    - `drawn`, the bootstrap: n sets of k different rollouts at random, `A_i` the sum over those that i is in. It is on average
      k times as large as the mean of `all`.
    - `split`, full sampling: n // k sets of neighbours, `A_i` that of the set of i. Rollouts without a set are not trained on.

    A set has the z-score of its reward among the sets, with the deviation of all of them (divisor: their number). A is 0 where
    no two sets have different rewards: without a success, with fewer than k failures, and in groups of k or fewer. With k = 1
    `all` is the z-score of GRPO.

    `combine` is the paper's combination training: `c/n A + (1 - c/n) (r - mean) / (std + eps)`, with `Rollouts.correct` for c.
    Prompts with few successes are then learned from as in GRPO. The paper has k = 4, 8 and 16 of 32 rollouts. It has no eps;
    1e-6 is that of the authors' code.
    """
    registry.one_of("sets", sets, ("all", "drawn", "split"))

    def advantages(rollouts, step):
        rewards, valid = rollouts.rewards, rollouts.valid
        if sets == "all":
            values = all_sets(rewards, valid, k, eps)
        elif sets == "drawn":
            member = drawn_sets(jax.random.fold_in(jax.random.key(seed), step), valid, k)
            values = of_members(rewards, member, valid, eps)
        else:
            member = split_sets(valid, k)
            values = of_members(rewards, member, jnp.any(member, axis=2), eps)
        if combine:
            solved = masked.group_mean(rollouts.correct.astype(rewards.dtype), valid)
            values = solved * values + (1 - solved) * _z_score(rewards, valid, eps)
        return values, step + 1

    keeps = None if sets != "split" else lambda rollouts: jnp.any(split_sets(rollouts.valid, k), axis=1)
    return stateful(lambda: jnp.int32(0), advantages, keeps=keeps)
