"""The interface of an objective: pure functions from log-probs and advantages to a loss that adds up over micro-batches.

To add one, write a file with a keyword-only factory under `@objective` that returns `token_objective(function)`:

    @objective
    def plain(*, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
        def token_loss(logprobs, rollouts, advantages):
            return -advantages * logprobs, {"logprob": logprobs}

        return token_objective(token_loss, aggregation=aggregation, max_len=max_len)

The function returns token losses `[P, G, T]` (or one per rollout, `[P, G]`) and metrics in either shape, NOT reduced:
the reduction is done here, with weights computed from the whole mini-batch, so that losses, gradients and metrics of
micro-batches sum to those of the whole. A metric named `max/...` is the largest value (at least 0) and combines by max.
"""
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import POSITION, Rollouts, clean, measured
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.aggregation import check_aggregation, sequence_weights, token_weights
from jaxrl_llm.tools import registry

State = Any
BEHAVIOR = "behavior_logprobs"
Metrics = dict[str, Array]
_TERMS = {  # keywords that objectives had, and the term in their place
    "kl_coef": "+ kl({value})", "kl_estimator": "+ kl(0.01, estimator={value!r})",
    "kl_ratio": "+ kl(0.01, estimator='unbiased')", "entropy_coef": "+ entropy({value})", "nll_coef": "+ nll({value})",
    "regulariser": "+ kl(0.2, estimator='k2', against='old')"}
FORMER = {keyword: f"it is a term of its own: write objective=\"{{slug}}(...) {term}\", or \"{term}\" to add it to a method's"
          for keyword, term in _TERMS.items()}
OWN_KL = {"kl_cov": "held_coef", "guirlvg_adv_kl": "reward_kl_coef", "remix": "anchor_coef"}  # their kl_coef, now
FORMER |= {
    "rec_family.regulariser='forward_kl'": "it is a term of its own: write objective=\"{slug}(...) + nll(0.1, on='all')\", or "
                                           "\"+ nll(0.1, on='all')\" to add it to a method's",
    "rec_family.regulariser='none'": "leave it out; regularisers are terms",
    "rec_family.kl_coef": "it was the coefficient c of the regulariser, which is a term: write + kl(2 c, estimator='k2', "
                          "against='old') for k2, + nll(c, on='all') for forward_kl, with {value} for c"}
FORMER |= {f"{slug}.kl_coef": f"it is not to the reference alone; write {own}={{value}}" for slug, own in OWN_KL.items()}


class Objective(NamedTuple):
    """`init() -> state`; `update(logprobs, rollouts, advantages, state) -> (loss, (metrics, state))`.

    `weights(rollouts)` returns a dict of arrays with leading axis P. A trainer calls it once on the whole mini-batch
    and gives each micro-batch its slice as `rollouts.loss_weights`; without them `update` treats its rollouts as the
    whole mini-batch. Each micro-batch of a step gets the same state. `whole_batch=True`: the loss of a rollout depends on
    the log-probs of others, so the mini-batch must not be split (unless the loss is first differentiated by all log-probs).
    `needs` names fields of `Rollouts`, or entries of its `extras`, that `update` reads: a trainer records them first.
    `reads_old`: `update` divides by the policy of `old_logprobs`; a batch without them counts as sampled by the policy that
    it updates.
    `replays`: the entry of `extras` whose experts a mixture takes for tokens instead of its router's choice; "": none.
    `shares`: the entry of `weights` by which terms that are added weigh tokens, see `terms.base.composed`. `loads`: a loss of
    the experts' loads of the whole mini-batch, see `terms.base.Term`. `corrects`: the loss itself corrects for rollouts that
    other weights sampled; terms that are added change nothing of it. `reads_apart`: it learns itself from given texts in a
    batch, which other objectives do not see, see `rollouts.with_apart`.
    `unknown`: what counts where the sampler did not draw a trained token, if `update` reads `behavior_logprobs`: "old", the
    policy's old log-prob, so that the weight is 1. A run with such tokens refuses an objective that does not say it.
    `position(logits f32[V], token i32[], seed u32[]) -> f32[]`: a function of the logits at one position, at the policy's
    temperature, and of the token that stands there. The pass measures it within its chunks of logits, so that no array of
    [T, V] is kept, and `update` reads `extras["position"]` f32[P, G, T] and is differentiated by it. The seed is that of
    `extras["token_seeds"]`, if `needs` names it.
    """

    init: Callable[[], State]
    update: Callable[[Array, Rollouts, Array, State], tuple[Array, tuple[Metrics, State]]]
    weights: Callable[[Rollouts], Mapping[str, Array]]
    whole_batch: bool = False
    needs: tuple[str, ...] = ()
    reads_old: bool = False
    replays: str = ""
    shares: str = "loss"
    loads: Callable[..., tuple[Array, Metrics]] | None = None
    corrects: bool = False
    position: Callable[[Array, Array, Array], Array] | None = None
    reads_apart: bool = False
    unknown: str = ""

    @property
    def takes_unknown(self) -> bool:
        """Whether trained tokens may lack a log-prob of the sampler."""
        return BEHAVIOR not in self.needs or self.unknown == "old"


OBJECTIVES = registry.PartTable("objective", Objective, pure=True, former=FORMER, given=("max_len",))
objective = OBJECTIVES.enter


def token_objective(token_loss: Callable, *, aggregation: str = "token_mean", max_len: int | None = None,
                    needs: tuple[str, ...] = (), extra_weights: Callable[[Rollouts], Mapping[str, Array]] | None = None,
                    init: Callable[[], State] | None = None, advance: Callable[[State], State] | None = None,
                    whole_batch: bool = False, reads_old: bool = False, replays: str = "", shares: str = "loss",
                    position: Callable[[Array, Array, Array], Array] | None = None, unknown: str = "") -> Objective:
    """The objective of `token_loss(logprobs, rollouts, advantages) -> (loss, metrics)`.

    Arguments are checked, detached (except `logprobs`) and zero outside the mask; advantages are [P, G, T].
    `needs` names the required fields of `Rollouts`, or entries of its `extras`; `replays`, `shares`, `position`,
    `unknown`: see `Objective`.
    Terms with other denominators: `extra_weights(rollouts) -> {name: [P, G, T] or [P, G]}` and a loss that is a dict
    `{"loss": ..., name: ...}`; each term is summed with the weights of its name.
    With `init` the function gets the state as fourth argument, and `advance(state)` makes the next state. It depends on
    nothing else, so that every micro-batch of a step returns the same state (a step count, a random key).
    """
    check_aggregation(aggregation, max_len)
    registry.one_of("log-prob in the place of an unknown one", unknown, ("", "old"))

    def weights(rollouts):
        own = {"loss": token_weights(rollouts, aggregation, max_len),
               "token": token_weights(rollouts, "token_mean"),
               "sequence": sequence_weights(rollouts)}
        return own if extra_weights is None else {**own, **extra_weights(measured(rollouts))}

    def update(logprobs, rollouts, advantages, state):
        given = rollouts.loss_weights  # the loss is linear in them, and its slope is the loss of each token
        of_logits = None if position is None else _values(rollouts)
        rollouts = lax.stop_gradient(clean(rollouts, *needs))
        mask = rollouts.token_mask
        for name, value in (("logprobs", logprobs), ("advantages", advantages)):
            if value.shape != mask.shape:
                raise ValueError(f"{name} has shape {value.shape}, expected [P, G, T] = {mask.shape} as rollouts.mask")
        logprobs = jnp.where(mask, logprobs, 0)
        advantages = lax.stop_gradient(jnp.where(mask, advantages, 0))
        if of_logits is not None:
            rollouts = rollouts.replace(extras={**rollouts.extras, POSITION: jnp.where(mask, of_logits, 0)})
        share = weights(rollouts) if given is None else given

        arguments = (logprobs, rollouts, advantages) + (() if init is None else (state,))
        losses, metrics = token_loss(*arguments)
        if not isinstance(losses, Mapping):
            losses = {"loss": losses}
        total = sum(summed(values, share[name], rollouts) for name, values in losses.items())
        metrics = {name: measure(name, values, share, rollouts) for name, values in metrics.items()}
        return total, (lax.stop_gradient(metrics), state if advance is None else advance(state))

    return Objective((lambda: ()) if init is None else init, update, weights, whole_batch,
                     (*needs, replays) if replays else needs, reads_old, replays, shares,
                     corrects=BEHAVIOR in needs, position=position, unknown=unknown)


def _values(rollouts: Rollouts) -> Array:
    """The values of `Objective.position`; ValueError without them."""
    if POSITION not in rollouts.extras:
        raise ValueError("this objective reads a function of the logits at each position, extras['position']; learn with a "
                         "policy that measures it, learning.step.measuring(policy, objective)")
    return rollouts.extras[POSITION]


def used(coefficient: float | Array) -> bool:
    """Whether a loss has a term: its coefficient is not 0, or is an array, whose value may change during a run."""
    return isinstance(coefficient, Array) or bool(coefficient)


def summed(values: Array, share: Array, rollouts: Rollouts) -> Array:
    """Sum of `values` times their weights, after giving both the shape [P, G, T] if one is per rollout."""
    if share.ndim == 2 and values.ndim == 2:
        return masked.sum(values * share, rollouts.live)
    if share.ndim == 2:
        share = masked.to_tokens(share, rollouts.token_mask)
    if values.ndim == 2:
        values = masked.to_tokens(values, rollouts.token_mask)
    return masked.sum(values * share, rollouts.token_mask)


def measure(name: str, values: Array, share: Mapping[str, Array], rollouts: Rollouts) -> Array:
    """Mean over tokens of [P, G, T], over live rollouts of [P, G]; the maximum for names that start with `max/`."""
    per_token = values.ndim == 3
    if name.startswith("max/"):
        return masked.max(values, rollouts.token_mask if per_token else rollouts.live, initial=0)
    return summed(values.astype(jnp.result_type(float)), share["token" if per_token else "sequence"], rollouts)
