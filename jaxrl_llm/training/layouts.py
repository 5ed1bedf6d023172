"""The two ways of a batch through the model: rectangular rows, each a prompt with its group, and packed rows.

The rectangular layout is the faster one where a prompt with its group fits. Packed rows pay for tokens that are there, wherever
they lie, and their micro-batches can be smaller than a prompt with its group, see `training.accumulate`.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxrl_llm import parallel
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.packing import Packed, at_temperatures, of_groups, pack
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.training import accumulate
from jaxrl_llm.training.guard import Guarded
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.shapes import Ladders, quarters_filled
from jaxrl_llm.training.step import in_parts, make_update


class Layout(NamedTuple):
    """How rollouts are computed.

    score: `(params, lora, rollouts) -> (logprobs, entropies)`, f32[P, G, T] each; see `Policy.logprobs`.
    update: `(state, rollouts, advantages, rate=None) -> (state, metrics)`, see `training.step.make_update`.
    ready: rollouts on the host -> the same with what the programs are promised, see `Rollouts.filled`.
    updates, scores: the compiled programs that learn and those that score.
    """

    score: Callable
    update: Callable
    ready: Callable[[Rollouts], Rollouts]
    updates: tuple[Guarded, ...]
    scores: tuple[Guarded, ...]


def rectangular(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, sizes: Ladders, *,
                clip_norm: float | None, balance: float, micro_batches: int, parts: int, together: int) -> Layout:
    """Batches `[P, G, T]` of these sizes.

    Args:
      parts: of a batch, that are scored one after another.
      together: prompts that go through the model at a time.
    """
    score = Guarded("score", jax.jit(in_parts(policy.logprobs, parts)), sizes.programs)
    update = Guarded("update", make_update(policy, objective, optimizer, clip_norm=clip_norm, micro_batches=micro_batches,
                                           balance=balance), sizes.programs)

    def ready(rollouts: Rollouts) -> Rollouts:
        least = sizes.filled_of(rollouts.mask.shape[2])
        return rollouts.replace(filled=max(least, quarters_filled(np.asarray(rollouts.token_mask), together)))

    return Layout(score, update, ready, (update,), (score,))


def packed(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, lengths: Sequence[int], size: int, *,
           clip_norm: float | None, balance: float) -> Layout:
    """Rows of one of the `lengths`, `size` of them at a time; batches `[P, G, T]` come in one shape.

    Rows are packed on the host, for each mini-batch and each pass over it.
    """
    # Scored are whole batches and mini-batches: two views for each length of rows.
    limits = {"score": 2 * len(lengths), "accumulate": len(lengths), "whole": len(lengths)}
    made = accumulate.make_parts(policy, objective, optimizer, clip_norm=clip_norm, balance=balance)
    guards: dict[str, Any] = {name: Guarded(name, getattr(made, name), limits.get(name, 1)) for name in made._fields[1:]}
    parts = made._replace(**guards)

    def rows(rollouts: Rollouts) -> Packed:
        given = parallel.fetch((rollouts.prompt_tokens, rollouts.prompt_mask, rollouts.tokens, rollouts.token_mask))
        found = pack(*of_groups(*given), given[-1], lengths, size)
        return found if rollouts.temperature is None else at_temperatures(found, parallel.fetch(rollouts.temperature))

    def score(params, lora, rollouts: Rollouts):
        placed = accumulate.placed(policy, size, rows(rollouts))
        (logprobs, _), entropies = accumulate.scores(parts.score, policy, params, lora, *placed)
        return logprobs, entropies

    def update(state, rollouts: Rollouts, advantages, rate=None):
        return accumulate.update(parts, size, state, rows(rollouts), rollouts, advantages, rate)

    return Layout(score, update, lambda rollouts: rollouts, (guards["accumulate"], guards["whole"]), (guards["score"],))
