"""The latest success on each prompt, put back where all rollouts fail (RAPO, arXiv 2509.24107)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm import masked
from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.rollouts import Role, Rollouts

SUCCESS = 0.5


class SuccessBuffer(NamedTuple):
    """One completion for each of N prompts: tokens i32[N, T], mask bool[N, T] (all False: none yet), who wrote them
    i8[N, T], the log-probs it was sampled with f32[N, T], its reward f32[N]."""

    tokens: Array
    mask: Array
    role: Array
    logprobs: Array
    rewards: Array


def empty(num_prompts: int, max_len: int) -> SuccessBuffer:
    """An empty buffer; `max_len` is the largest T of the rollouts to come."""
    shape = num_prompts, max_len
    return SuccessBuffer(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int8), jnp.zeros(shape),
                         jnp.zeros(num_prompts))


def roles(rollouts: Rollouts) -> Array:
    """i8[P, G, T]: who wrote each token; without a record the policy wrote what is trained."""
    return jnp.where(rollouts.mask, jnp.int8(Role.POLICY), jnp.int8(Role.PADDING)) if rollouts.role is None else rollouts.role


def replay(buffer: SuccessBuffer, rollouts: Rollouts, key: Array) -> tuple[Rollouts, Array]:
    """Rollouts in which one random member of each all-failed group is the stored success; and which one, bool[P, G].

    All-failed: no valid reward above 0.5. Entries longer than the rollouts' T are not used. A replayed completion
    carries the `behavior_logprobs` of its time, so that an importance ratio can correct for its age. `old_logprobs`,
    `ref_logprobs` and `entropies` belonged to tokens that are gone: they are None in the result, to be measured anew.
    """
    valid, T = rollouts.valid, rollouts.mask.shape[2]
    failed = masked.max(rollouts.rewards, valid, axis=1, initial=-jnp.inf) <= SUCCESS
    entry = SuccessBuffer(*(x[rollouts.prompt_ids] for x in buffer))
    fits = jnp.any(entry.mask, axis=1) & ~jnp.any(entry.mask[:, T:], axis=1)
    slot = jnp.argmax(jnp.where(valid, jax.random.uniform(key, valid.shape), -1), axis=1)
    chosen = valid & (failed & fits)[:, None] & (jnp.arange(valid.shape[1])[None] == slot[:, None])

    def put(stored, present):
        return jnp.where(chosen[..., None], stored[:, None, :T], present)

    replayed = rollouts.replace(
        tokens=put(entry.tokens, rollouts.tokens), mask=put(entry.mask, rollouts.mask),
        role=put(entry.role, roles(rollouts)),
        behavior_logprobs=put(entry.logprobs, rollouts.behavior_logprobs),
        rewards=jnp.where(chosen, entry.rewards[:, None], rollouts.rewards),
        old_logprobs=None, ref_logprobs=None, entropies=None,
    )
    return replayed, chosen


def store(buffer: SuccessBuffer, rollouts: Rollouts, replayed: Array) -> SuccessBuffer:
    """The buffer with the last success of each group, replayed ones (`replayed` bool[P, G]) not counted.

    Call it after the update. Prompt ids are rows of the buffer, each at most once in the batch.
    """
    N, max_len = buffer.mask.shape
    G, T = rollouts.mask.shape[1:]
    won = rollouts.live & ~replayed & (rollouts.rewards > SUCCESS)
    last = G - 1 - jnp.argmax(won[:, ::-1], axis=1)
    rows = jnp.where(jnp.any(won, axis=1), rollouts.prompt_ids, N)

    def put(old, new):
        new = jnp.take_along_axis(new, last.reshape(-1, *[1] * (new.ndim - 1)), axis=1)[:, 0]
        if new.ndim == 2:
            new = jnp.pad(new, ((0, 0), (0, max_len - T)))
        return old.at[rows].set(new.astype(old.dtype), mode="drop")

    fresh = SuccessBuffer(rollouts.tokens, rollouts.mask, roles(rollouts), rollouts.behavior_logprobs, rollouts.rewards)
    return SuccessBuffer(*map(put, buffer, fresh))


@controller
def success_replay() -> Controller:
    """`successes`: the buffer, from which `replay` fills the next batch. Facts: `rollouts`, `replayed`; see `store`.

    `init(num_prompts, max_len)`, see `empty`.
    """
    return Controller(empty, lambda buffer: {"successes": buffer},
                      lambda buffer, facts: store(buffer, facts["rollouts"], facts["replayed"]),
                      facts=("rollouts", "replayed"), knobs=("successes",))
