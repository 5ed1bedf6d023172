"""What an estimator is: a pair of pure functions from rollouts to one advantage per token.

To add one, write a file with a keyword-only factory under `@estimator` that returns `stateless(function)`:

    @estimator
    def centred(*, scale: float = 1.0) -> Estimator:
        def advantages(rollouts):
            return scale * (rollouts.rewards - masked.group_mean(rollouts.rewards, rollouts.valid))

        return stateless(advantages)

The function may return `[P, G]` or `[P, G, T]`. Checks, stop-gradient, broadcasting to tokens and exact zeros outside
the mask are done here. Padding and holes it sees are zeroed, but still have to be left out of means: use `jaxrl_llm.masked`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm import masked, registry
from jaxrl_llm.rollouts import Rollouts, clean, measured

State = Any
ESTIMATORS: dict[str, registry.Factory] = {}
estimator = functools.partial(registry.register, ESTIMATORS, "estimator")


class OfTurns(NamedTuple):
    """Numbers of a critic of turns: the discount of a turn, the share by which slow copies follow, passes over a batch."""

    gamma: float
    tau: float
    epochs: int


class Estimator(NamedTuple):
    """`init() -> state`; `update(rollouts, state) -> (advantages f32[P, G, T], state)`, both pure; no state is `()`.

    `needs` names fields of `Rollouts`, or entries of its `extras`, that `update` reads: a trainer records them first.
    `value_targets(rollouts, monte_carlo) -> f32[P, G, T]` is what the critic behind `extras["values"]` is fitted to, with
    `monte_carlo` (a Python bool) the returns that were seen, whatever the values are. None: no critic is asked for.
    `metrics(rollouts, advantages, state) -> scalars by name`, with the state from before the update, is what the estimator
    tells about a batch. `history(state) -> (predicted [N], actual [N], group i32[N], real bool[N])` are its last predictions
    of rewards beside what came, made before it came, and which prompt they belong to. None: there is nothing to tell.
    `wants_more(rollouts, first, most) -> bool[P]`, of rollouts with `rewards`, `valid` and the `extras` that `needs` names,
    says which prompts to sample again, when a prompt gets `first` rollouts at once and at most `most`. None: all get the same.
    `keeps(rollouts) -> bool[P, G]` says which of them are learned from, once advantages are known. None: all.
    `turn_critic`: numbers of the critic of turns (`values.turn_critic`) behind `extras["turn_q"]` and `extras["turn_v"]`. None:
    no such critic is asked for.
    `bootstrap`: first batches in which the advantages are those of a simpler method, while what makes the difference is fitted;
    the metric `bootstrap` is then the share of rollouts for which they still are.
    """

    init: Callable[[], State]
    update: Callable[[Rollouts, State], tuple[Array, State]]
    needs: tuple[str, ...] = ()
    value_targets: Callable[[Rollouts, bool], Array] | None = None
    metrics: Callable[[Rollouts, Array, State], dict[str, Array]] | None = None
    history: Callable[[State], tuple[Array, Array, Array, Array]] | None = None
    wants_more: Callable[[Rollouts, int, int], Array] | None = None
    keeps: Callable[[Rollouts], Array] | None = None
    turn_critic: OfTurns | None = None
    bootstrap: int = 0

    @property
    def has_critic(self) -> bool:
        """Whether something is fitted to values beside the policy, of tokens or of turns."""
        return self.value_targets is not None or self.turn_critic is not None


def stateless(function: Callable[[Rollouts], Array], *, needs: tuple[str, ...] = ("rewards",),
              value_targets: Callable[[Rollouts, bool], Array] | None = None) -> Estimator:
    """The estimator of a plain function `rollouts -> advantages [P, G] or [P, G, T]`.

    `needs` names the fields of `Rollouts`, or entries of its `extras`, without which the function cannot work;
    `value_targets` is for those that need a critic, see `Estimator`.
    """
    found = stateful(lambda: (), lambda rollouts, state: (function(rollouts), state), needs=needs)
    return found._replace(value_targets=value_targets)


def stateful(
    init: Callable[[], State],
    function: Callable[[Rollouts, State], tuple[Array, State]],
    *,
    needs: tuple[str, ...] = ("rewards",),
    metrics: Callable[[Rollouts, Array, State], dict[str, Array]] | None = None,
    history: Callable[[State], tuple[Array, Array, Array, Array]] | None = None,
    wants_more: Callable[[Rollouts, int, int], Array] | None = None,
    keeps: Callable[[Rollouts], Array] | None = None,
    bootstrap: int = 0,
) -> Estimator:
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
