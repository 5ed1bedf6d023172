"""MSSR: one rollout per prompt, with a success tracker per prompt and an entropy bonus (arXiv 2512.18215)."""
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.kl import token_kl
from jaxrl_llm.tools import registry


class Tracker(NamedTuple):
    """Statistics of N prompts: `ids` i32[N] (-1: none), discounted `successes` and `failures` f32[N].

    The prompt with id i has the index i % N; a prompt with the same index replaces it. `kls` f32[W] are the KLs of
    the last W steps, `steps` i32 the number of steps so far.
    """

    ids: Array
    successes: Array
    failures: Array
    kls: Array
    steps: Array


def retention(kl: Array, *, target: float, rho_min: float, rho_max: float, rule: str) -> Array:
    """Factor by which the tracker's counts shrink per outcome, between rho_min and rho_max, from the recent mean KL.

    `monotone`: rho_max - (rho_max - rho_min) min(kl / target, 1): the faster the policy moves, the more is forgotten.
    `code`: as published, rho_min + (rho_max - rho_min) kl / target up to the target and rho_min beyond it: this forgets
    most when the policy does not move, contrary to the stated intent.
    """
    share = jnp.minimum(kl / target, 1)
    if rule == "code":
        share = jnp.where(kl > target, 1, 1 - share)
    return rho_max - share * (rho_max - rho_min)


def success_rate(tracker: Tracker, ids: Array, v_init: float) -> Array:
    """successes / (successes + failures) of the prompts `ids` (any shape), `v_init` for prompts not in the tracker."""
    place = ids % tracker.ids.size
    seen = (ids >= 0) & (tracker.ids[place] == ids)
    won, lost = tracker.successes[place], tracker.failures[place]
    return jnp.where(seen, won / jnp.where(seen, won + lost, 1), v_init)


def count_outcomes(tracker: Tracker, ids: Array, wins: Array, real: Array, rho: Array, prior: Array) -> Tracker:
    """Counts after the outcomes `wins` bool[B] of prompts `ids` i32[B], one by one: count <- rho * count + [won].

    A prompt that is not in the tracker starts with `prior` = (successes, failures). Rows that are not `real`, or whose
    id is negative, are skipped.
    """
    size = tracker.ids.size

    def step(state, row):
        (known, counts), (i, won, real) = state, row
        here = jnp.where(known[i % size] == i, counts[:, i % size], prior)
        here = rho * here + jnp.stack([won, 1 - won])
        place = jnp.where(real, i % size, size)
        return (known.at[place].set(i, mode="drop"), counts.at[:, place].set(here, mode="drop")), None

    counts = jnp.stack([tracker.successes, tracker.failures])
    (known, counts), _ = lax.scan(step, (tracker.ids, counts), (ids, wins.astype(counts.dtype), real & (ids >= 0)))
    return tracker._replace(ids=known, successes=counts[0], failures=counts[1])


@estimator
def mssr(*, num_prompts: int = 65536, rho_min: float = 0.875, rho_max: float = 0.96, rho_rule: str = "code",
         target_kl: float = 0.01, kl_window: int = 20, kl_estimator: str = "k3", v_init: float = 0.5, entropy_coef: float = 0.4,
         entropy_cap: float = 2.0, entropy: str = "token") -> Estimator:
    """`A_t = A + min(|A| / entropy_cap, entropy_coef H_t)`, `A = r - v` whitened over the batch, v tracked per prompt.

    v = successes / (successes + failures) of `prompt_ids` before this step, `v_init` for a new prompt. The
    tracker has `num_prompts` entries: with more prompts than that, prompts that share an entry keep overwriting each other.
    Whitening: (x - mean) / sqrt(max(population variance, 1e-6)), skipped for a batch of one. Then the tracker counts
    each outcome, right or wrong (see `count_outcomes`); a new prompt starts with 1 / (1 - rho_min) pseudo-counts. The
    counts decay by `retention`, computed from the mean over the last `kl_window` steps of the batch's mean
    token KL between old and reference policy. H_t is the entropy, or with `entropy="sampled"` the published code's
    -p log p of the sampled token. `entropy_coef=0` is the paper's vanilla form, MVSR, which collapses. All numbers but
    `num_prompts` are the published code's.
    """
    registry.one_of("rho_rule", rho_rule, ("code", "monotone"))
    registry.one_of("entropy", entropy, ("token", "sampled"))
    prior_count = 1 / (1 - rho_min)

    def init():
        empty = jnp.zeros(num_prompts)
        return Tracker(jnp.full(num_prompts, -1, jnp.int32), empty, empty, jnp.zeros(kl_window), jnp.int32(0))

    def observe(tracker, rollouts, ids):
        kl = masked.mean(token_kl(rollouts.old_logprobs, rollouts.ref_logprobs, kl_estimator), rollouts.token_mask, 2)
        measured = jnp.any(rollouts.live)
        slot = jnp.where(measured, tracker.steps % kl_window, kl_window)
        kls = tracker.kls.at[slot].set(masked.mean(kl, rollouts.live), mode="drop")
        steps = tracker.steps + measured.astype(jnp.int32)
        rho = retention(masked.mean(kls, jnp.arange(kl_window) < steps), target=target_kl, rho_min=rho_min,
                        rho_max=rho_max, rule=rho_rule)
        rho = jnp.where(steps > 0, rho, (rho_min + rho_max) / 2)
        prior = jnp.asarray([v_init * prior_count, (1 - v_init) * prior_count], kls.dtype)
        tracker = tracker._replace(kls=kls, steps=steps)
        return count_outcomes(tracker, ids.ravel(), rollouts.correct.ravel(), rollouts.valid.ravel(), rho, prior)

    def advantages(rollouts, tracker):
        valid = rollouts.valid
        ids = jnp.broadcast_to(rollouts.prompt_ids[:, None], valid.shape)
        surprise = rollouts.rewards - success_rate(tracker, ids, v_init)
        centred = surprise - masked.mean(surprise, valid, keepdims=True)
        white = centred / jnp.sqrt(jnp.maximum(masked.var(surprise, valid, ddof=0, keepdims=True), 1e-6))
        A = jnp.where(masked.count(valid) > 1, white, surprise)[..., None]
        H = rollouts.entropies if entropy == "token" else -jnp.exp(rollouts.old_logprobs) * rollouts.old_logprobs
        return A + jnp.minimum(jnp.abs(A) / entropy_cap, entropy_coef * H), observe(tracker, rollouts, ids)

    needs = ("rewards", "prompt_ids", "old_logprobs", "ref_logprobs")
    return stateful(init, advantages, needs=(*needs, "entropies") if entropy == "token" else needs)
