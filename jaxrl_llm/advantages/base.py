"""The interface of an estimator: a pair of pure functions from rollouts to one advantage per token.

To add one, write a file with a keyword-only factory under `@estimator` that returns `stateless(function)`:

    @estimator
    def centred(*, scale: float = 1.0) -> Estimator:
        def advantages(rollouts):
            return scale * (rollouts.rewards - masked.group_mean(rollouts.rewards, rollouts.valid))

        return stateless(advantages)

The function may return `[P, G]` or `[P, G, T]`. Checks, stop-gradient, broadcasting to tokens and exact zeros outside
the mask are done here. The function sees padding and holes as zeros and must exclude them from means: use
`jaxrl_llm.maths.masked`.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import Rollouts, clean, measured
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

State = Any


class OfTurns(NamedTuple):
    """Settings of a critic of turns: discount per turn, rate at which the slow copies follow, passes over a batch."""

    gamma: float
    tau: float
    epochs: int


class Estimator(NamedTuple):
    """`init() -> state`; `update(rollouts, state) -> (advantages f32[P, G, T], state)`, both pure; no state is `()`.

    `needs` names fields of `Rollouts`, or entries of its `extras`, that `update` reads: a trainer records them first.
    `value_targets(rollouts, monte_carlo) -> f32[P, G, T]` are the targets of the critic behind `extras["values"]`; with
    `monte_carlo` (a Python bool) they are the observed returns, whatever the values are. None: no critic is needed.
    `metrics(rollouts, advantages, state) -> scalars by name`, with the state from before the update, are the estimator's
    metrics of a batch. `history(state) -> (predicted [N], actual [N], group i32[N], real bool[N])` are its last predictions of
    rewards, made before the rewards were known, beside the actual rewards, and the prompt of each. None: no such record.
    `wants_more(rollouts, first, most) -> i32[P] or bool[P]`, of rollouts with `rewards`, `valid` and the `extras` that `needs`
    names, says how many rollouts prompts get next, or which get `first` more, when all have `first` and at most `most` are
    allowed. None: all get the same.
    `learned(rollouts, ratios, state) -> state` follows the updates of a batch, with the step's fact `ratios`, see
    `control.Fact`. None: the state is that of `update`.
    `keeps(rollouts) -> bool[P, G]` says which rollouts are trained on, once advantages are known. None: all.
    `turn_critic`: settings of the critic of turns (`values.turn_critic`) behind `extras["turn_q"]` and `extras["turn_v"]`.
    None: no such critic is needed.
    `bootstrap`: number of first batches whose advantages come from a simpler method, while the estimator's own model is fitted;
    the metric `bootstrap` is then the share of rollouts for which they still do.
    """

    init: Callable[[], State]
    update: Callable[[Rollouts, State], tuple[Array, State]]
    needs: tuple[str, ...] = ()
    value_targets: Callable[[Rollouts, bool], Array] | None = None
    metrics: Callable[[Rollouts, Array, State], dict[str, Array]] | None = None
    history: Callable[[State], tuple[Array, Array, Array, Array]] | None = None
    wants_more: Callable[[Rollouts, int, int], Array] | None = None
    keeps: Callable[[Rollouts], Array] | None = None
    learned: Callable[[Rollouts, Array, State], State] | None = None
    turn_critic: OfTurns | None = None
    bootstrap: int = 0

    @property
    def has_critic(self) -> bool:
        """Whether a critic, of tokens or of turns, is trained beside the policy."""
        return self.value_targets is not None or self.turn_critic is not None


# Runs give the longest completion in tokens and the width of `rollouts.features`; a text may set them by name.
ESTIMATORS = registry.PartTable("estimator", Estimator, pure=True, given=("max_len", "feature_size"))
estimator = ESTIMATORS.enter


def stateless(function: Callable[[Rollouts], Array], *, needs: tuple[str, ...] = ("rewards",),
              value_targets: Callable[[Rollouts, bool], Array] | None = None) -> Estimator:
    """The estimator of a plain function `rollouts -> advantages [P, G] or [P, G, T]`.

    `needs` names the fields of `Rollouts`, or entries of its `extras`, without which the function cannot work;
    `value_targets` is for estimators that need a critic, see `Estimator`.
    """
    built = stateful(lambda: (), lambda rollouts, state: (function(rollouts), state), needs=needs)
    return built._replace(value_targets=value_targets)


def stateful(init: Callable[[], State], function: Callable[[Rollouts, State], tuple[Array, State]], *,
             needs: tuple[str, ...] = ("rewards",), metrics: Callable[[Rollouts, Array, State], dict[str, Array]] | None = None,
             history: Callable[[State], tuple[Array, Array, Array, Array]] | None = None,
             wants_more: Callable[[Rollouts, int, int], Array] | None = None, keeps: Callable[[Rollouts], Array] | None = None,
             bootstrap: int = 0) -> Estimator:
    """As `stateless`, for `(rollouts, state) -> (advantages, state)`; the state is a pytree of static shapes.

    `metrics`, `history`, `wants_more`, `keeps` and `bootstrap`: see `Estimator`.
    """

    def update(rollouts, state):
        rollouts = lax.stop_gradient(clean(rollouts, *needs))
        advantages, state = function(rollouts, state)
        mask = rollouts.token_mask
        if advantages.shape == rollouts.valid.shape:
            return masked.to_tokens(advantages, mask), state
        if advantages.shape != mask.shape:
            allowed = f"[P, G] = {rollouts.valid.shape} or [P, G, T] = {mask.shape}"
            raise ValueError(f"estimator returned shape {advantages.shape}; it must be {allowed}")
        return jnp.where(mask, advantages, jnp.zeros((), advantages.dtype)), state

    tell = None if metrics is None else lambda rollouts, *rest: metrics(lax.stop_gradient(clean(rollouts, *needs)), *rest)
    more = None if wants_more is None else lambda rollouts, *rest: wants_more(measured(rollouts), *rest)
    kept = None if keeps is None else lambda rollouts: keeps(measured(rollouts))
    return Estimator(init, update, needs, metrics=tell, history=history, wants_more=more, keeps=kept, bootstrap=bootstrap)
