"""The interface of a term, and the sum of an objective and terms: losses, gradients and metrics add up over micro-batches.

To add one, write a file with a keyword-only factory under `@term` whose first number is the coefficient:

    @term
    def unlikely(*, coef: float, least: float = -5.0) -> Term:
        return Term("unlikely", coef, lambda logprobs, rollouts: jnp.maximum(least - logprobs, 0))
"""
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.experts import expert_tokens
from jaxrl_llm.data.rollouts import APART, CURRENT_ENTROPIES, Rollouts, clean, measured, without_apart
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import BEHAVIOR, Metrics, Objective, measure, summed, used
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.memo import remembered


class Term(NamedTuple):
    """A summand of the loss: `coef * sum over tokens of share * value`, or `coef` times a loss of the experts' loads.

    `name`: of the term; a loss has one of each name. `coef`: a number, or an array that follows a schedule.
    `value(logprobs, rollouts)`: f32[P, G, T], differentiable in `logprobs`; arguments are those of a `token_objective`,
    and `extras["current_entropies"]`, if `needs` names them, differentiable too.
    `weights(share, rollouts)`: f32[P, G, T], the share of each token, from `share`, that of the objective's own loss, which is
    0 on tokens that the objective leaves out; both are of the whole mini-batch. `needs`, `reads_old`, `unknown`: as of an
    `Objective`.
    `metric`: the name under which the mean of `value` over all tokens is reported; "": none.
    `loads(loads, chosen, per_token)`: f32[], see `terms.balance`; such a term has no `value`.
    `apart`: it learns from tokens that the objective does not see, see `rollouts.with_apart`; its own `weights` add up to 1,
    and its metric is the mean by them.
    """

    name: str
    coef: float | Array
    value: Callable[[Array, Rollouts], Array] | None = None
    weights: Callable[[Array, Rollouts], Array] = lambda share, rollouts: share
    needs: tuple[str, ...] = ()
    reads_old: bool = False
    metric: str = ""
    loads: Callable[..., Array] | None = None
    apart: bool = False
    unknown: str = ""


TERMS = registry.PartTable("term", Term, pure=True)
term = TERMS.enter


@remembered(64)
def composed(base: Objective, terms: tuple[Term, ...]) -> Objective:
    """`base + terms`, without the terms of coefficient 0.

    Tokens of a term have the weights of the objective's own loss, `base.weights(rollouts)[base.shares]`: for a loss of whole
    rollouts the weight of a rollout in equal parts on its tokens. Tokens that stand apart are seen by terms, and by an
    objective that `reads_apart`. Raises ValueError: two terms of one name, or an objective without such weights.
    """
    terms = tuple(one for one in terms if used(one.coef))
    if not terms:
        return base
    base = base if base.reads_apart else _of_policy(base)
    names = [one.name for one in terms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the loss has {', '.join(twice)} more than once; write one of each with the sum of the coefficients")
    valued = tuple(one for one in terms if one.value is not None)
    needs = tuple(dict.fromkeys(name for one in valued for name in one.needs))

    def weights(rollouts: Rollouts) -> Mapping[str, Array]:
        own, seen = base.weights(rollouts), measured(rollouts)
        share = _of_tokens(own, base.shares, rollouts.token_mask)
        there = [one for one in valued if not one.apart or {*one.needs} <= seen.extras.keys()]  # `of_turns` weighs apart itself
        return {**own, **{f"term/{one.name}": one.weights(share, seen) for one in there}}

    def update(logprobs, rollouts, advantages, state):
        if rollouts.loss_weights is None:
            rollouts = rollouts.replace(loss_weights=weights(rollouts))
        loss, (metrics, state) = base.update(logprobs, rollouts, advantages, state)
        seen = _current(rollouts, lax.stop_gradient(clean(rollouts, *needs)))
        logprobs = jnp.where(seen.token_mask, logprobs, 0)
        for one in valued:
            values = one.value(logprobs, seen)
            loss = loss + one.coef * summed(values, rollouts.loss_weights[f"term/{one.name}"], seen)
            if one.metric:
                by = {"token": seen.loss_weights[f"term/{one.name}"]} if one.apart else seen.loss_weights
                metrics = metrics | {one.metric: lax.stop_gradient(measure(one.metric, values, by, seen))}
        return loss, (metrics, state)

    of_loads = [one for one in terms if one.loads is not None]
    return base._replace(
        update=update if valued else base.update, weights=weights if valued else base.weights, needs=(*base.needs, *(
            name for name in needs if name not in base.needs)), reads_old=base.reads_old or any(one.reads_old for one in terms),
        unknown="old" if base.takes_unknown and all(BEHAVIOR not in one.needs or one.unknown for one in valued) else "",
        whole_batch=base.whole_batch or bool(of_loads), loads=functools.partial(_loads, of_loads) if of_loads else base.loads)


def _of_policy(base: Objective) -> Objective:
    """The objective without the tokens that stand apart, whose weights are 0."""
    def weights(rollouts: Rollouts) -> Mapping[str, Array]:
        own = base.weights(plain := without_apart(rollouts))
        if APART not in rollouts.extras:
            return own
        masks = {2: plain.live, 3: plain.token_mask}
        return {name: jnp.where(masks[x.ndim], x, 0) if x.ndim in masks else x for name, x in own.items()}

    def update(logprobs, rollouts, advantages, state):
        return base.update(logprobs, without_apart(rollouts), advantages, state)

    return base._replace(weights=weights, update=update)


def _current(rollouts: Rollouts, seen: Rollouts) -> Rollouts:
    """The detached rollouts, but for entropies of the policy that is updated."""
    if CURRENT_ENTROPIES not in rollouts.extras:
        return seen
    current = jnp.where(seen.token_mask, rollouts.extras[CURRENT_ENTROPIES], 0)
    return seen.replace(extras={**seen.extras, CURRENT_ENTROPIES: current})


def _of_tokens(own: Mapping[str, Array], name: str, mask: Array) -> Array:
    """The weights of this name for tokens, f32[P, G, T], those of rollouts in equal parts on their tokens."""
    if name not in own:
        raise ValueError(f"the objective weighs {', '.join(sorted(own))}, and its `shares` are {name!r}, by which terms that "
                         "are added to it weigh tokens; return an Objective whose `shares` names an entry of `weights`")
    if own[name].ndim == 3:
        return own[name]
    return masked.to_tokens(own[name] / jnp.maximum(masked.count(mask, axis=2), 1), mask)


def _loads(terms: list[Term], loads, chosen, per_token, state) -> tuple[Array, Metrics]:
    """The loss of the experts' loads, and its metrics."""
    losses = {one.name: one.loads(loads, chosen, per_token) for one in terms}
    metrics = {one.metric: lax.stop_gradient(losses[one.name]) for one in terms if one.metric}
    return sum((one.coef * losses[one.name] for one in terms), jnp.zeros(())), metrics


def by_expert(rollouts: Rollouts) -> Array:
    """bool[P, G, T]: trained tokens of an expert; none in a batch without `extras["expert"]`."""
    return expert_tokens(rollouts) if "expert" in rollouts.extras else jnp.zeros(rollouts.mask.shape, bool)


TOKENS: dict[str, Callable[[Rollouts], Array]] = {  # a term's `on`: bool[P, G, T], some of the trained tokens
    "all": lambda rollouts: rollouts.token_mask,
    "policy": lambda rollouts: rollouts.token_mask & ~by_expert(rollouts),
    "expert": lambda rollouts: expert_tokens(rollouts),
    "right": lambda rollouts: rollouts.token_mask & rollouts.correct[..., None],
}
NEEDS = {"all": (), "policy": (), "expert": ("expert",), "right": ("rewards",)}  # what these read


def named(name: str, choice: str, usual: str) -> str:
    """The name of a term with this choice: `name` for the usual one."""
    return name if choice == usual else f"{name}_{choice}"
