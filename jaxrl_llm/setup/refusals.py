"""Refusals before the first step of a run: methods and settings that are incompatible."""
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import advantages, environments, methods, objectives, rewards
from jaxrl_llm.data.rollouts import OWN_ROUTES, ROUTES, Rollouts
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.setup import parts
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import PartTable

Reward = rewards.Combined | rewards.ByTask
_PROBABILITIES = "old_logprobs", "ref_logprobs", "behavior_logprobs", "entropies"


def check_method(config: ConfigDict, made: Parts, environment: environments.Environment | None = None) -> None:
    """Raises NotImplementedError for a method with needs that no run provides, ValueError for settings incompatible with it.

    `environment`: the environment of trajectories, if there is one.
    """
    method, estimator, needs, knobs, c = made.method, made.estimator, made.needs, made.controls.knobs, config
    methods.provision.check(method, estimator, made.objective, made.there)
    if environment is not None and environment.contexts > 1 and "traj" not in estimator.needs:
        fitting = ("agents: spiral, advevo_baseline, dr_mas" if environment.apart
                   else "trajectories: multi_context_grpo, markov_multi_turn")
        raise ValueError(f"environment {environment.name!r} begins new contexts in a trajectory, each a rollout of its own; "
                         f"method {method.slug!r} would count a trajectory as often as it has contexts; take one that compares "
                         f"{fitting}")
    if c.lora.rank and {"reference", "reset"} & knobs:
        raise ValueError(f"method {method.slug!r} updates the reference from full weights; LoRA does not change them. Set "
                         "lora.rank=0, or take another method")
    if "reset" in knobs and c.optimizer.schedule != "constant":
        raise ValueError(f"method {method.slug!r} resets the optimiser, with which optimizer.schedule={c.optimizer.schedule!r} "
                         "would begin again and not end at 0; set optimizer.schedule=constant, or take another method")
    if config.environment and (count := len(written.calls(config.task))) > 1:
        raise ValueError(f"config.task={config.task!r} names {count} tasks, and config.environment={config.environment!r} has "
                         "a task of its own, so that no run would read them; name tasks or an environment")
    if config.budget.utility:
        check_budget(config, made)
    check_group(config, made)
    if estimator.has_critic and c.critic.pretrain_steps >= c.steps:
        raise ValueError(f"config.critic.pretrain_steps={c.critic.pretrain_steps} leave none of the {c.steps} steps "
                         "to the policy; set fewer (0: none), or more steps")
    s = config.sampling
    if "behavior_logprobs" in needs and (s.top_k or s.top_p < 1 or s.min_p):
        raise ValueError(f"method {method.slug!r} weighs tokens by learner over sampler probability; top_k, top_p and min_p "
                         "change only the latter: switch them off (0, 1, 0)")
    if config.environment and "answers" in needs:
        raise ValueError(f"method {method.slug!r} compares the answers of the rollouts, and an environment does not tell which "
                         "text is the answer; take another method, for example grpo")
    if "tool_coef" in knobs and environment is not None and environment.tools and "tool_calls" not in environment.facts:
        raise ValueError(f"method {method.slug!r} rewards turns that call tools, and environment {environment.name!r} has "
                         "tools but not the fact 'tool_calls'; add it, or take another method, for example grpo")
    low, high = (_keyword(name, method.part("estimator"), c.estimator, advantages.base.ESTIMATORS) for name in ("low", "high"))
    if environment is not None and low is not None and not low <= environment.returns[0] < environment.returns[1] <= high:
        raise ValueError(f"method {method.slug!r} predicts rewards from {low:g} to {high:g}, and trajectories of environment "
                         f"{environment.name!r} return {environment.returns[0]:g} to {environment.returns[1]:g}; set "
                         f"config.estimator=\"low={environment.returns[0]:g}, high={environment.returns[1]:g}\"")
    check_guide(config, made, environment)
    check_pool(config, made)
    check_replay(config, made)
    check_sizes(config, made)
    parts.sampling_of(config)


def check_replays(made: Parts, model: Transformer) -> None:
    """Raises ValueError if the method reads or replays the experts of tokens, and the model is dense."""
    if made.needs & {ROUTES, OWN_ROUTES} and model.config.experts is None:
        raise ValueError(f"method {made.method.slug!r} reads or replays the experts of a mixture, and this model is dense; "
                         "leave routing=free in config.objective, or take a mixture of experts")


def check_lag(config: ConfigDict, made: Parts, lag: int) -> None:
    """Raises ValueError for weights that sample older than those that learn, where nothing corrects for it.

    An objective with a ratio takes the log-probs of sampling as its old ones, unless it corrects for both.
    """
    if not lag:
        return
    if not (made.objective.corrects or made.objective.reads_old):
        able = [slug for slug, row in methods.METHODS.items() if corrects(row)]
        raise ValueError(f"config.schedule={config.schedule!r} samples with older weights, and the objective of method "
                         f"{made.method.slug!r} has no ratio that corrects for it; set schedule=sync, or take a method with a "
                         f"correction: {', '.join(able)}; PPO's ratio, as in grpo, is one to the policy that sampled")
    s = config.sampling
    if s.top_k or s.top_p < 1 or s.min_p:
        raise ValueError(f"config.schedule={config.schedule!r} divides by the sampler's probabilities, which top_k, top_p and "
                         "min_p change: switch them off (0, 1, 0), or set schedule=sync")
    if config.server.url:
        raise ValueError(f"config.schedule={config.schedule!r} needs the sampler of this process, and server.url is "
                         f"{config.server.url!r}; leave one of the two out")


def corrects(row: methods.Method) -> bool:
    """Whether the objective of a row corrects for the policy that sampled."""
    name, numbers = row.part("objective")
    budget = {"max_len": 1} if "max_len" in objectives.base.OBJECTIVES.parameters(name) else {}
    return objectives.make(name, **budget | dict(numbers)).corrects


def check_group(config: ConfigDict, made: Parts) -> None:
    """Raises ValueError if a method compares completions of a prompt, and there is one, or all are equal."""
    s, knobs = config.sampling, made.controls.knobs
    more = config.budget.utility or made.estimator.wants_more is not None or made.rule is not None or "group_sizes" in knobs
    if s.group < 2 and not (more and s.max_group > 1) and ("features" in made.needs or compares(made, 1)):
        raise ValueError(f"method {made.method.slug!r} compares the completions of a prompt, but sampling.group is {s.group}; "
                         "give 2 or more")
    if not (s.temperature or "temperature" in knobs or config.environment) and compares(made, s.group):
        raise ValueError(f"config.sampling.temperature is 0, at which all completions of a prompt are equal, and method "
                         f"{made.method.slug!r} compares them; give more than 0, usually 1")


def compares(made: Parts, group: int) -> bool:
    """Whether a method learns nothing from groups of this number of equal completions, whatever their rewards are.

    Its estimator is asked. False if that reads more than is made up here, or if replay or objective have signals of their own.
    """
    P, shape = 4, (4, group, 2)
    logprobs = np.full(shape, -1, np.float32)
    rewards = np.repeat(np.linspace(0.1, 1, P, dtype=np.float32)[:, None], group, axis=1)
    fields: dict[str, Any] = {
        **dict(zip(_PROBABILITIES, (logprobs, 1.25 * logprobs, logprobs, -logprobs))), "prompt_ids": np.arange(P),
        "reward_components": rewards[..., None], "rewards": rewards, "tokens": np.ones(shape, np.int32)}
    estimator, quiet = made.estimator, {*_PROBABILITIES, "truncated", "policy_version", "current_version"}
    if not {*estimator.needs} <= {*fields} or not {*made.objective.needs} <= quiet or made.replay is not None:
        return False
    there: Any = np.ones(shape, bool)
    alike = Rollouts(mask=there, valid=there[..., 0], **fields)
    return not np.any(estimator.update(alike, estimator.init())[0])


def check_sizes(config: ConfigDict, made: Parts) -> None:
    """Raises ValueError if two parts decide the number of a prompt's rollouts, or a method and its settings disagree on it.

    The method may need equal numbers for all prompts, or the settings may leave no room for unequal ones. Raises
    NotImplementedError if a rule reads measurements of a whole batch, and a filter draws the batch in parts.
    """
    method, estimator, rule = made.method, made.estimator, made.rule
    deciding = [f"the budget {config.budget.utility!r}"] * bool(config.budget.utility)
    deciding += ["its controllers"] * ("group_sizes" in made.controls.knobs)
    deciding += ["its allocation rule"] * (rule is not None)
    unequal = list(deciding)
    deciding += ["its estimator"] * (estimator.wants_more is not None)
    if len(deciding) > 1:
        raise ValueError(f"{' and '.join(deciding)} of method {method.slug!r} both say how many rollouts a prompt gets; "
                         "set budget.utility to nothing, or take another method")
    if unequal and (estimator.has_critic or "features" in made.needs or made.replay is not None):
        raise ValueError(f"{unequal[0]} of method {method.slug!r} gives prompts unequal numbers of rollouts, which "
                         "critics, hidden-state baselines and replay do not support; take another method")
    if (unequal or estimator.wants_more is not None) and _keyword(
            "aggregation", method.part("objective"), config.objective, objectives.base.OBJECTIVES) == "prompt_mean":
        raise ValueError(f"{deciding[0]} of method {method.slug!r} gives prompts unequal numbers of rollouts, which are cut "
                         "into rows, and aggregation='prompt_mean' would weigh each row like a prompt; set config.objective="
                         "\"aggregation=token_mean\" (or seq_mean_token_mean), or take another method")
    s, mean = config.sampling, 1 if rule is None else rule.mean
    pilot = 0 if rule is None else rule.pilot
    if unequal and not config.budget.utility and s.max_group <= mean * (pilot or s.group):
        first = f"pilot={pilot}; raise it" if pilot else (
            f"sampling.group={s.group}; raise it, or set it to 0: four times the group")
        raise ValueError(f"{unequal[0]} of method {method.slug!r} would give all prompts the same number of rollouts: "
                         f"sampling.max_group={s.max_group} is no more than {mean:g} x {first}")
    drawn_again = [name for name, one in made.filters.items() if one.per == "prompt" and one.refills]
    if rule is not None and rule.reads and drawn_again:
        raise NotImplementedError(f"the allocation rule of method {method.slug!r} reads {', '.join(rule.reads)}, which are "
                                  f"measured of a whole batch, and the filter {drawn_again[0]!r} draws a batch in several "
                                  "parts; leave one of the two out")


def _keyword(name: str, part: tuple[str, Mapping[str, Any]], overrides: str, factories: PartTable) -> Any:
    """The value of a keyword in an estimator or objective of a run; None where it has no such keyword."""
    factory, numbers = part
    parameter = factories.parameters(factory).get(name)
    return {**numbers, **written.keywords(overrides)}.get(name, None if parameter is None else parameter.default)


def check_replay(config: ConfigDict, made: Parts) -> None:
    """Raises ValueError if stored groups cannot enter a batch, or their number would grow without bound."""
    if made.replay is None:
        return
    made.replay.most(problems=1, per_step=1)
    if config.budget.utility or "prior" in made.needs:
        raise ValueError(f"method {made.method.slug!r} has a replay, whose rollouts have no reward predictions; set "
                         "budget.utility to nothing, or take a method without replay, for example grpo")


def check_guide(config: ConfigDict, made: Parts, environment: environments.Environment | None) -> None:
    """Raises ValueError if completions cannot begin with a solution, or no completion would be the policy's own."""
    guide, method, s = made.guide, made.method, config.sampling
    if guide is None:
        return
    if config.budget.utility:
        raise ValueError(f"method {method.slug!r} begins completions with solutions of a task, and this run samples with a "
                         "budget; leave that out, or take another method, for example grpo")
    if environment is not None and environment.oracle is None:
        for problem in environment.task.train:
            if "solution" not in problem.extra:
                raise ValueError(f"method {method.slug!r} begins trajectories as an expert would, and environment "
                                 f"{environment.name!r} has neither an oracle nor a solution of problem {problem.id}; give it "
                                 "an oracle, or its problems an extra['solution'], or take another method, for example grpo")
    if s.top_k or s.top_p < 1 or s.min_p:
        raise ValueError(f"method {method.slug!r} takes log-probs of solutions, which top_k, top_p and min_p cut away; switch "
                         "them off (0, 1, 0)")
    guide.first(s.group)


def check_pool(config: ConfigDict, made: Parts) -> None:
    """Raises ValueError if groups of other runs cannot be trained on: they are texts without log-probs."""
    if not config.pool.path:
        return
    others = ["samples in an environment"] * bool(config.environment)
    others += ["has a budget"] * bool(config.budget.utility)
    others += ["replays rollouts of its own"] * (made.replay is not None)
    others += ["shows solutions"] * (made.guide is not None)
    read = ("behavior_logprobs", "entropies", *made.measured)
    others += [f"reads {name} of the sampler" for name in read if name in made.needs]
    others += ["expects something of prompts"] * ("prior" in made.needs)
    unequally = made.rule is not None or made.estimator.wants_more is not None or "group_sizes" in made.controls.knobs
    others += ["samples prompts unequally"] * unequally
    if others:
        raise ValueError(f"config.pool.path={config.pool.path} shares groups as texts, and method {made.method.slug!r} "
                         f"{', '.join(others)}; leave it empty, or take another method, for example swarm_sapo")


def check_budget(config: ConfigDict, made: Parts) -> None:
    """Raises ValueError if budgets are incompatible with other parts that choose prompts or need equal groups."""
    method, estimator = made.method, made.estimator
    others = [f"the filter {name!r}" for name, _ in method.parts("filters")]
    others += ["an estimator that asks for more rollouts itself"] * (estimator.wants_more is not None)
    others += ["a baseline from hidden states"] * ("features" in made.needs)
    others += ["a critic"] * estimator.has_critic
    if others:
        raise ValueError(f"config.budget.utility={config.budget.utility!r} does not go together with {', '.join(others)} of "
                         f"method {method.slug!r}; leave it empty, or take another method, for example grpo")
    c, most = config, config.budget.prompts * config.sampling.max_group
    if most <= c.prompts.per_step * c.sampling.group:
        raise ValueError(f"budget.prompts={c.budget.prompts} of at most sampling.max_group={c.sampling.max_group} completions "
                         f"each take {most} of the {c.prompts.per_step} x {c.sampling.group} of a step, which leaves "
                         "nothing to allocate; raise one of the two")


def check_balance(config: ConfigDict, model: Transformer) -> None:
    """Raises ValueError for a balancing loss of experts if the model has none."""
    if config.learner.balance and model.config.experts is None:
        raise ValueError(f"config.learner.balance={config.learner.balance} is for experts, and this model has none; "
                         "set it to 0, or take a mixture of experts")


def check_reward(made: Parts, reward: Reward) -> None:
    """Raises ValueError if the method compares answers and the reward reads none, or if it learns from rewards that are 0."""
    for one in reward.parts if isinstance(reward, rewards.ByTask) else (reward,):
        if "rewards" in made.needs and not any(part.weight for part in one.rewards):
            raise ValueError(f"method {made.method.slug!r} learns from rewards, and the weight of {', '.join(one.names)} is 0: "
                             "every reward would be 0; give one of them another weight in config.rewards or the task's reward")
    if "answers" in made.needs and not reward.extracts:
        raise ValueError(f"method {made.method.slug!r} compares the answers of the rollouts, and the reward "
                         f"{reward.names[0]!r} does not extract an answer; set config.score to one that "
                         "does: exact, last_number, numeric, boxed or reasoning_gym")
