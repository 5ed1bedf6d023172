"""Estimator and objective of a configuration; numbers of the objective are constants or schedules."""
from typing import Any

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.advantages import Estimator
from jaxrl_llm.methods import composition, texts
from jaxrl_llm.objectives import Objective
from jaxrl_llm.objectives.scheduled import Schedule, scheduled
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import one_of


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` in equal steps, then `end`."""
    return optax.linear_schedule(start, end, steps)


def cosine(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` along half a cosine, then `end`."""
    return lambda step: end + (start - end) * (1 + jnp.cos(jnp.pi * jnp.minimum(step / steps, 1.0))) / 2


SCHEDULES = {"linear": linear, "cosine": cosine}


def schedule(text: str, steps: int) -> Schedule:
    """The schedule `linear(start=0.1, end=0)` or `cosine(...)`, over `steps` unless `steps=...` is given; else ValueError."""
    (name, options), *others = written.calls(text)
    if others:
        raise ValueError(f"{text!r} are {1 + len(others)} schedules; give one")
    given = {"steps": steps, **options}
    for option in given:
        one_of(f"option of the schedule {name!r}", option, ("start", "end", "steps"))
    if len(given) < 3 or not all(isinstance(value, int | float) for value in given.values()) or given["steps"] < 1:
        raise ValueError(f"{text!r}: a schedule has a start, an end and steps of 1 or more, e.g. linear(start=0.1, end=0)")
    return SCHEDULES[one_of("schedule", name, SCHEDULES)](**given)


def method_parts(config: ConfigDict, method: methods.Method, feature_size: int) -> tuple[Estimator, Objective]:
    """Estimator and objective of a method, `feature_size` being the width of `rollouts.features`.

    Numbers of the objective and its terms may be schedules: `kl(linear(start=0.1, end=0))`. Their steps are those that train
    the policy, without the first ones, which only train a critic.
    """
    of_the_run = {"max_len": config.sampling.max_tokens, "feature_size": feature_size}
    estimator = composition.estimator_of(method, **of_the_run)
    base, *added = method.parts("objective")
    alone = max(config.critic.pretrain_steps, 0) if estimator.has_critic else 0
    per_step, steps = max(config.learner.epochs * config.learner.minibatches, 1), max(config.steps - alone, 1)
    balance = [texts.Named("balance", {"coef": config.learner.balance})] if config.learner.balance else []
    sums = {"": base} | {f"{term.name}_": term for term in added}
    numbers = {f"{prefix}{name}": schedule(value, steps) for prefix, part in sums.items()
               for name, value in part.numbers.items() if texts.follows(value)}

    def objective(**now: Any) -> Objective:
        parts = [part._replace(numbers={name: now.get(f"{prefix}{name}", value) for name, value in part.numbers.items()})
                 for prefix, part in sums.items()]
        return composition.objective_of([*parts, *balance], **of_the_run)

    return estimator, scheduled(objective, numbers, per_step) if numbers else objective()
