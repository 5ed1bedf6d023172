"""Automatic values of a configuration, and those of a method's paper."""
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.learning.optimizers import settings_of
from jaxrl_llm.tools.registry import one_of
from jaxrl_llm.tools.written import calls

# What a row of the catalogue may say of its paper's setting -> the key that it is; the rest are parts of runs of your own.
PAPER = {"prompts": "prompts.per_step", "group_size": "sampling.group", "max_group": "sampling.max_group",
         "temperature": "sampling.temperature",
         "top_p": "sampling.top_p", "turns": "sampling.max_turns", "observation_tokens": "sampling.observation_tokens",
         "epochs": "learner.epochs", "minibatches": "learner.minibatches",
         "foreign_groups": "pool.groups", "pretrain_steps": "critic.pretrain_steps", "budget": "budget.utility",
         "environment": "environment", "schedule": "schedule", "prior": "prior.source"}


def resolve(config: ConfigDict, defaults: Mapping[str, Any]) -> ConfigDict:
    """A copy in which automatic values are resolved: `learner.epochs` and `minibatches` of 0 become those of `defaults`, or 1.

    With `setting="paper"` the `defaults` replace all keys that they set, see `as_in_paper`.
    A default number of minibatches that does not divide the batch becomes the largest smaller one that does. Also resolved
    are 0 or empty values of `sampling.max_group`, `critic.learning_rate`, `pool.groups`, `texts.share` and `budget`, and values
    of -1 of `critic.pretrain_steps` (without a default 0) and, if the optimiser has them, `optimizer.b1` and `b2`. Raises
    ValueError for settings that the optimiser does not have.
    """
    one_of("config.setting", config.setting, ("", "paper"))
    config = of_one_turn(config)
    config = as_in_paper(config, defaults) if config.setting else config
    learner, P = config.learner, config.prompts.per_step
    config.sampling.max_group = config.sampling.max_group or 4 * config.sampling.group
    learner.epochs = learner.epochs or defaults.get("epochs", 1)
    if not learner.minibatches:
        fits = (n for n in range(defaults.get("minibatches", 1), 1, -1) if P % (n * max(learner.micro_batches, 1)) == 0)
        learner.minibatches = next(fits, 1)
    config.pool.groups = config.pool.groups or P // 2
    config.texts.share = config.texts.share or defaults.get("text_share", 0.0)
    budget = config.budget
    budget.utility, budget.prompts = budget.utility or defaults.get("budget", ""), budget.prompts or max(P // 2, 1)
    o = config.optimizer
    settings = settings_of(o.name, b1=o.b1, b2=o.b2, momentum=o.momentum, weight_decay=o.weight_decay)
    o.b1, o.b2 = settings.get("b1", o.b1), settings.get("b2", o.b2)
    critic = config.critic
    critic.learning_rate = critic.learning_rate or config.optimizer.learning_rate
    if critic.pretrain_steps == -1:
        critic.pretrain_steps = defaults.get("pretrain_steps", 0)
    return config


def as_in_paper(config: ConfigDict, defaults: Mapping[str, Any]) -> ConfigDict:
    """A copy with the paper's settings in `defaults`."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({PAPER[name]: in_paper(config, name, value) for name, value in defaults.items()
                                       if name in PAPER})
    return config


def in_paper(config: ConfigDict, name: str, value: Any) -> Any:
    """The value of the key of a paper's setting: the paper's, or the environment of the configuration with its options.

    An environment of another name has options of its own, and stays as it is.
    """
    if name != "environment":
        return value
    (wanted, options), = calls(value)
    match calls(config.environment):
        case [(found, given)] if found == wanted and given | options != given:
            return f"{wanted}({', '.join(f'{key}={one!r}' for key, one in (given | options).items())})"
    return config.environment


def of_one_turn(config: ConfigDict) -> ConfigDict:
    """A copy in which the environment `single(task=..., options=..., reward=...)` is the task itself: both are one turn."""
    config, named = config.copy_and_resolve_references(), calls(config.environment)
    if [name for name, _ in named] == ["single"]:
        options = named[0][1]
        if unknown := options.keys() - {"task", "options", "reward"}:
            raise ValueError(f"config.environment={config.environment!r} sets {min(unknown)!r}; single has task, options "
                             "and reward")
        told = {**(options.get("options") or {}), **({"reward": options["reward"]} if options.get("reward") else {})}
        numbers = ", ".join(f"{name}={value!r}" for name, value in told.items())
        config.task, config.environment = f"{options.get('task', 'arithmetic')}({numbers})", ""
    return config
