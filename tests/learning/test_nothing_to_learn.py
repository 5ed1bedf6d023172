"""Values with which a run could learn nothing, or only nonsense, are refused before it starts, by the name of their key."""
import math

import pytest

from jaxrl_llm import advantages, objectives, rewards
from jaxrl_llm.advantages import alike
from jaxrl_llm.setup import parts, why
from jaxrl_llm.setup.check import check
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.problems import make_sets, make_task
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.values import Around

FLOATS = """sampling.temperature sampling.top_p sampling.min_p optimizer.learning_rate optimizer.weight_decay
    optimizer.b1 optimizer.b2 optimizer.momentum optimizer.ema lora.alpha critic.learning_rate
    warmup.learning_rate warmup.strays texts.share environment_invalid""".split()
BOUNDS = ["optimizer.clip_norm", "critic.clip", "warmup.loss", "reward_deadline", "environment_deadline", "server.deadline",
          "server.max_mismatch", "pool.max_age"]


def changed(**keys):
    config = default_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return resolve(config, {})


def float_keys(config, prefix=""):
    for key, value in config.items():
        if hasattr(value, "items"):
            yield from float_keys(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key


def test_every_number_of_the_configuration_is_finite_unless_it_is_a_bound():
    assert sorted(float_keys(default_config())) == sorted(FLOATS + BOUNDS)
    for key in FLOATS + BOUNDS:
        for value in (math.nan, -math.inf) + (math.inf,) * (key in FLOATS):
            with pytest.raises(ValueError, match=f"config.{key} is {value}"):
                check(changed(**{key: value}))
        if key in BOUNDS:
            check(changed(**{key: math.inf}))


@pytest.mark.parametrize("key, value", (
    ("lora.alpha", 0.0), ("lora.alpha", -16.0), ("sampling.top_p", 0.0), ("sampling.top_p", 2.0), ("sampling.min_p", 1.0),
    ("sampling.top_k", -1), ("sampling.observation_tokens", -1), ("sampling.stop_strings", ("",)),
    ("sampling.stop_strings", ("###", "")), ("sampling.stop_strings", (5,)), ("warmup.strays", 1.5), ("seed", -1),
    ("model.num_heads", 3), ("model.hidden_size", 12), ("pool.groups", -1)))
def test_values_that_leave_nothing_to_learn_from(key, value):
    with pytest.raises(ValueError) as refusal:
        check(changed(**{key: value}))
    assert f"config.{key}" in str(refusal.value) and str(value) in str(refusal.value)


def test_sizes_of_experts():
    check(changed(model__experts=4))
    with pytest.raises(ValueError, match="config.model.experts_per_token is 2 of config.model.experts=1"):
        check(changed(model__experts=1))
    with pytest.raises(ValueError, match="config.model.mlp_size is 512, which config.model.experts_per_token=3 do not share"):
        check(changed(model__experts=4, model__experts_per_token=3))
    check(changed(model__experts=4, model__experts_per_token=3, model__expert_size=100))
    check(changed(model__sizes="qwen2.5_1.5b", model__num_heads=3))  # of a published model these keys are not read


@pytest.mark.parametrize("changes, message", (
    (dict(sampling__group=1), "method 'grpo' compares the completions of a prompt, but sampling.group is 1; give 2 or more"),
    (dict(sampling__group=1, method="gdpo"), "method 'gdpo' compares the completions of a prompt"),
    (dict(sampling__temperature=0.0), "config.sampling.temperature is 0, at which all completions of a prompt are equal"),
    (dict(sampling__group=1, method="gapo"), "method 'gapo' compares the completions of a prompt"),
    (dict(sampling__group=1, method="optimal_token_baseline"), "method 'optimal_token_baseline' compares the completions"),
    (dict(sampling__temperature=0.0, method="kimi_opmd"), "config.sampling.temperature is 0"),
    (dict(sampling__temperature=0.0, method="optimal_token_baseline"), "config.sampling.temperature is 0"),
    (dict(sampling__temperature=0.0, method="remax"), "every completion is the greedy one that estimator 'remax' compares")))
def test_methods_that_compare_completions_need_some_that_differ(changes, message):
    config = changed(**changes)
    with pytest.raises(ValueError, match=message):
        why.check(config, parts.make_parts(config, 128, make_task(config.task)))


@pytest.mark.parametrize("changes", (
    dict(method="reinforce_pp"), dict(method="ppo"), dict(method="nsr"), dict(method="pacs"), dict(method="gvm_raft_pp"),
    dict(method="dars"), dict(method="remax")))
def test_methods_that_learn_from_single_completions_are_not_refused(changes):
    config = changed(sampling__group=1, **changes)
    made = parts.make_parts(config, 128, make_task(config.task))
    assert made.rule is not None or not alike.compares(made.estimator, made.objective, 1)


def test_rewards_of_weight_zero():
    config = changed()
    made = parts.make_parts(config, 128)
    one = rewards.combine([rewards.make("format", pattern="a", weight=0.0)])
    with pytest.raises(ValueError, match="learns from rewards, and the weight of format is 0"):
        why.check(config, made, Around(reward=one))
    both = rewards.combine([rewards.make("format", pattern="a"), rewards.make("exact", weight=0.0)])
    why.check(config, made, Around(reward=both))  # one that is only reported
    with pytest.raises(ValueError, match="the weight of format is 0"):
        why.check(config, made, Around(reward=rewards.ByTask(("a", "b"), (both, one))))


@pytest.mark.parametrize("make, name, number, allowed", (
    (objectives.terms.make, "kl", {"coef": math.nan}, "0 or more, finite"),
    (objectives.terms.make, "kl", {"coef": math.inf}, "0 or more, finite"),
    (objectives.terms.make, "kl", {"coef": -0.1}, "0 or more, finite"),
    (objectives.terms.make, "kl", {"coef": "nan"}, "a number, for example 0.01"),
    (objectives.make, "ppo_clip", {"clip_high": -0.2}, "0 or more"),
    (objectives.make, "pacs", {"beta": 0.0}, "more than 0, finite"), (objectives.make, "kl_cov", {"fraction": 2}, "at most 1"),
    (objectives.make, "kepo", {"kd_coef": math.inf}, "a finite number"), (advantages.make, "grpo", {"eps": -1e-6}, "0 or more"),
    (advantages.make, "gigpo", {"gamma": 1.5}, "0 or more and at most 1"), (advantages.make, "asym_re", {"baseline_shift":
                                                                            math.nan}, "a number")))
def test_numbers_outside_their_range(make, name, number, allowed):
    (key, value), = number.items()
    with pytest.raises(ValueError) as refusal:
        make(name, **number)
    assert f"{name!r}: {key}={value!r}; give" in str(refusal.value) and allowed in str(refusal.value)


def test_bounds_that_are_never_reached_stay_allowed():
    objectives.make("ppo_clip", clip_high=math.inf)
    objectives.of("luffy + entropy(-0.01)", max_len=8)
    objectives.make("cispo", clip_low=None, clip_high=None)


@pytest.mark.parametrize("temperature", ("-1", "1e999"))
def test_temperatures_of_evaluation_sets(temperature):
    config = changed()
    config.eval.sets = f"arithmetic(label=other, temperature={temperature})"
    with pytest.raises(ValueError, match="evaluation set 'other': .*temperature at least 0"):
        make_sets(config, make_task(config.task))
