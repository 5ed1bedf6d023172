"""POISE: rewards minus what a probe on the hidden states of the prompt's other rollouts predicts (arXiv 2605.07579)."""
from collections.abc import Sequence

import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.maths import masked
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.values import diagnostics
from jaxrl_llm.values.poise import comparable, cross_rollout
from jaxrl_llm.values.poise import poise as value_model

_OUTSIDE = Conflict(
    ("environment", "estimator.low", "estimator.high"), "method {method!r} predicts rewards from {1:g} to {2:g}, and "
    "trajectories of environment {0.name!r} return {0.returns[0]:g} to {0.returns[1]:g}",
    "set config.estimator=\"low={0.returns[0]:g}, high={0.returns[1]:g}\"",
    lambda environment, low, high: not low <= environment.returns[0] < environment.returns[1] <= high)


@estimator(conflicts=(_OUTSIDE,))
def poise(*, feature_size: int, capacity: int = 4096, bootstrap: int = 16, first_fit: int = 8,
          probe: str | Sequence[str] = "ridge", ensemble: str = "mean", alpha: float = 100.0,
          components: Sequence[int] | None = None, low: float = 0.0, high: float = 1.0, domains: int = 1) -> Estimator:
    """`A_i = r_i - mean over j != i of g(phi_j)`, g fitted to earlier batches with labels `y_j = mean over i != j of r_i`.

    `phi` is `rollouts.features [P, G, feature_size]`, rewards are in [low, high]. For the first `bootstrap` batches, and until
    the probe has been fitted, the baseline is the mean reward of the others (RLOO). Predictions come before the batch enters
    the window of the last `capacity` rollouts: a probe fitted to the label y_j = r_i would leak r_i into its own baseline.
    Prompts with fewer than two valid rollouts get 0 and do not train the probe. Nothing is normalised. With `domains` K > 1
    each number 0 to K - 1 in `extras["task"]` has a separate probe, window and start.
    `alpha` is the released code's, which has it with `components=(32, 64)`; the paper has 0.01 and all columns, which overfits
    labels of 0 and 1 while the window is short.
    """
    if domains < 1 or bootstrap < 0 or first_fit < 1:
        raise ValueError(f"domains={domains}, bootstrap={bootstrap}, first_fit={first_fit}: give at least 1, 0 and 1")
    model = value_model(feature_size=feature_size, capacity=capacity, first_fit=first_fit, probe=probe, ensemble=ensemble,
                        alpha=alpha, components=components, low=low, high=high)
    start = max(bootstrap, first_fit)

    def of_domain(rollouts, k):
        """bool[P, G]: valid rollouts of domain k."""
        if domains == 1:
            return rollouts.valid
        return rollouts.valid & (rollouts.extras["task"] == k)[:, None]

    def predictions(rollouts, states):
        """`(g(phi) [P, G], bool[P, G]: the probe is in use)`."""
        predicted, in_use = jnp.zeros_like(rollouts.rewards), jnp.zeros_like(rollouts.valid)
        for k, state in enumerate(states):
            own = of_domain(rollouts, k)
            predicted = jnp.where(own, model.predict(state, rollouts.features), predicted)
            in_use |= own & (state.steps >= start)
        return predicted, in_use

    def advantages(rollouts, states):
        rewards, valid = rollouts.rewards, rollouts.valid
        predicted, in_use = predictions(rollouts, states)
        others = cross_rollout(rewards, valid)
        baseline = jnp.where(in_use, cross_rollout(predicted, valid), others)
        observed = tuple(model.observe(state, rollouts.features, others, of_domain(rollouts, k))
                         for k, state in enumerate(states))
        return jnp.where(comparable(valid), rewards - baseline, 0.0), observed

    def metrics(rollouts, advantages, states):
        """The probe's metrics against the mean reward of the other rollouts; NaN while the probe is not in use."""
        predicted, in_use = predictions(rollouts, states)
        real = rollouts.valid & comparable(rollouts.valid)
        labels = cross_rollout(rollouts.rewards, rollouts.valid)
        per_rollout = jnp.sum(advantages, axis=-1) / jnp.maximum(rollouts.lengths, 1)  # the same on all its tokens
        quality = diagnostics.quality(predicted, labels, real & in_use)
        quality = {name: jnp.where(jnp.any(real & in_use), x, jnp.nan) for name, x in quality.items()}
        quality["variance_reduction"] = diagnostics.variance_reduction(per_rollout, rollouts.rewards, real & rollouts.live)
        quality["rows"] = sum(jnp.sum(state.buffer.real, dtype=jnp.float32) for state in states)
        idle = masked.mean(1.0 - in_use.astype(jnp.float32), real)
        return {f"value/{name}": x for name, x in quality.items()} | {"bootstrap": idle}

    return stateful(
        lambda: tuple(model.init() for _ in range(domains)), advantages, metrics=metrics, history=_history, bootstrap=start,
        needs=("rewards", "features") if domains == 1 else ("rewards", "features", "task"))


def _history(states):
    """Rows that were predicted before they were seen: `(predicted [N], actual [N], group i32[N], bool[N])`."""
    columns = []
    for k, state in enumerate(states):
        buffer = state.buffer
        rows = buffer.rows
        columns.append((rows["prediction"], rows["label"], buffer.group * len(states) + k, buffer.real & rows["predicted"]))
    return tuple(jnp.concatenate(column) for column in zip(*columns))
