"""The two layouts of a batch in the model: rectangular rows, each a prompt with its group, and packed rows.

The rectangular layout is faster if a prompt with its group fits. Packed rows only cost their actual tokens, and their
micro-batches can be smaller than a prompt with its group, see `learning.accumulate`.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxrl_llm import parallel
from jaxrl_llm.data.packing import Packed, at_temperatures, of_groups, pack, with_experts, with_seeds
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.data.shapes import Ladders, quarters_filled
from jaxrl_llm.learning import accumulate, packed_features
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.learning.step import jitted, make_update, measuring
from jaxrl_llm.objectives.base import Objective
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.tools.guard import Guarded


class Layout(NamedTuple):
    """The functions that compute rollouts in a layout.

    logprobs: `(params, lora, rollouts) -> (logprobs, entropies)`, f32[P, G, T] each; see `Policy.logprobs`.
    update: `(state, rollouts, advantages, rate=None) -> (state, metrics)`, see `learning.step.make_update`.
    ready: rollouts on the host -> the same with the promise to the programs, see `Rollouts.filled`.
    objective, optimizer: those of `update`, which is compiled with them.
    update_programs, logprob_programs: the compiled programs of each.
    values: as `logprobs`, with what the objective computes of the logits behind them, see `Objective.position`; None without.
    features: `(params, lora, rollouts) -> (logprobs, entropies, features)`, see `Policy.logprobs_and_features`; None without a
      `Capture`.
    placed: `rollouts -> (micro_batches, index)`, see `accumulate.placed`; None for rectangular rows.
    """

    logprobs: Callable
    update: Callable
    ready: Callable[[Rollouts], Rollouts]
    objective: Objective
    optimizer: optax.GradientTransformation
    update_programs: tuple[Guarded, ...]
    logprob_programs: tuple[Guarded, ...]
    features: Callable | None = None
    placed: Callable | None = None
    values: Callable | None = None


def rectangular(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, sizes: Ladders, *,
                clip_norm: float | None, micro_batches: int, parts: int, together: int,
                capture: Capture | None = None) -> Layout:
    """Batches `[P, G, T]` of these sizes.

    Args:
      parts: number of parts of a batch, whose log-probs and features are computed one after another.
      together: number of prompts that go through the model at a time.
    """
    logprobs = Guarded("log-probs", jitted(type(policy).logprobs, policy, parts), sizes.programs)
    update = Guarded("update", make_update(policy, objective, optimizer, clip_norm=clip_norm, micro_batches=micro_batches),
                     sizes.programs)

    features = None if capture is None else Guarded(
        "features", jitted(type(policy).logprobs_and_features, policy, parts, capture=capture), sizes.programs)

    def ready(rollouts: Rollouts) -> Rollouts:
        least = sizes.filled_of(rollouts.mask.shape[2])
        return rollouts.replace(filled=max(least, quarters_filled(np.asarray(rollouts.token_mask), together)))

    values = None if objective.position is None else Guarded(
        "values", jitted(type(policy).logprobs_and_values, measuring(policy, objective), parts), sizes.programs)
    return Layout(logprobs, update, ready, objective, optimizer, (update,), (logprobs,), features, values=values)


def packed(policy: Policy, objective: Objective, optimizer: optax.GradientTransformation, lengths: Sequence[int], size: int, *,
           clip_norm: float | None, capture: Capture | None = None) -> Layout:
    """Rows of one of the `lengths`, `size` of them at a time; batches `[P, G, T]` come in one shape.

    Rows are packed on the host, once for consecutive measurements and updates of a batch.
    """
    # Log-probs are computed for whole batches and for mini-batches: two views for each length of rows.
    limits = {"logprobs": 2 * len(lengths), "accumulate": len(lengths), "whole": len(lengths)}
    made = accumulate.make_parts(policy, objective, optimizer, clip_norm=clip_norm)
    guards: dict[str, Any] = {name: Guarded(name, getattr(made, name), limits.get(name, 1)) for name in made._fields[1:]}
    parts, of_states = made._replace(**guards), None if capture is None else packed_features.make(policy, capture)
    plain = guards["logprobs"] if objective.position is None else Guarded(  # log-probs alone cost no function of the logits
        "log-probs", accumulate.make_logprobs(policy), limits["logprobs"])
    if of_states is not None:
        of_states = of_states._replace(add=Guarded("features", of_states.add, len(lengths)))

    @remembers_last
    def pack_arrays(prompt_tokens, prompt_mask, tokens, mask, valid, temperature, experts, seeds) -> Packed:
        prompt_tokens, prompt_mask, tokens, mask, valid, temperature, experts, seeds = parallel.fetch(
            (prompt_tokens, prompt_mask, tokens, mask, valid, temperature, experts, seeds))
        mask = mask & valid[..., None]
        rows = pack(*of_groups(prompt_tokens, prompt_mask, tokens, mask), mask, lengths, size)
        rows = rows if temperature is None else at_temperatures(rows, temperature)
        rows = rows if seeds is None else with_seeds(rows, seeds)
        return rows if experts is None else with_experts(rows, experts)

    def packed_of(rollouts: Rollouts) -> Packed:
        r = rollouts
        return pack_arrays(r.prompt_tokens, r.prompt_mask, r.tokens, r.mask, r.valid, r.temperature, policy.given(r),
                           parts.policy.seeds(r))

    def logprobs(params, lora, rollouts: Rollouts):
        micro_batches, index = placed(rollouts)
        return accumulate.view_of(plain, policy, params, lora, micro_batches, index)[:2]

    def values(params, lora, rollouts: Rollouts):
        micro_batches, index = placed(rollouts)
        view = accumulate.view_of(parts.logprobs, parts.policy, params, lora, micro_batches, index)
        return *view[:2], *view[3:]

    def features(params, lora, rollouts: Rollouts):
        return packed_features.seen(of_states, policy, params, lora, texts_of(rollouts), size, packed_of(rollouts))

    def placed(rollouts: Rollouts):
        return accumulate.placed(policy, size, packed_of(rollouts))

    def update(state, rollouts: Rollouts, advantages, rate=None):
        return accumulate.update(parts, size, state, packed_of(rollouts), rollouts, advantages, rate)

    updates = tuple(guards[name] for name in ("differentiate", "accumulate", "apply", "whole"))
    of_logits = () if objective.position is None else (guards["logprobs"],)
    return Layout(logprobs, update, lambda rollouts: rollouts, objective, optimizer, updates, (plain, *of_logits),
                  None if capture is None else features, placed, None if objective.position is None else values)


def remembers_last(function: Callable) -> Callable:
    """The function of arrays that returns its last result again for the identical arrays, if those are immutable."""
    last: list[Any] = [(), None]

    def remembered(*given):
        same = len(last[0]) == len(given) and all(a is b for a, b in zip(last[0], given))
        if not same or not all(x is None or isinstance(x, jax.Array) for x in given):
            last[:] = given, function(*given)
        return last[1]

    return remembered
