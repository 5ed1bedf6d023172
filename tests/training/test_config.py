"""Defaults, hyper-parameters in a string, and refusals before anything is loaded."""
import pytest

from jaxrl_llm.training.config import arithmetic_table, check, default_config, keywords


def test_defaults_pass_and_are_locked_against_typing_errors():
    config = default_config()
    check(config)
    with pytest.raises(AttributeError, match="batch_size"):
        config.lock()
        config.prompts.batch_size = 3


@pytest.mark.parametrize("text, wanted", (
    ("", {}), ("  ", {}), ("eps=1e-4", {"eps": 1e-4}), ("kl_coef=0.01, clip_high=0.28", {"kl_coef": 0.01, "clip_high": 0.28}),
    ("a=1 b=2", {"a": 1, "b": 2}), ("aggregation=token_mean", {"aggregation": "token_mean"}),
    ("aggregation='token_mean',max_len=None", {"aggregation": "token_mean", "max_len": None}),
    ("levels=(1, 2), whiten=True", {"levels": (1, 2), "whiten": True}), ("a = 1 , b = -2", {"a": 1, "b": -2}),
    ("a=1,", {"a": 1})))
def test_keywords(text, wanted):
    assert keywords(text) == wanted


@pytest.mark.parametrize("text", ("0.1", "kl_coef 0.1", "=3", "a=", "a=1, 2b=3, =4"))
def test_keywords_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="write hyper-parameters as name=value"):
        keywords(text)


@pytest.mark.parametrize("key", (
    "steps", "prompts.per_step", "sampling.group", "sampling.max_tokens", "sampling.max_rounds", "learner.epochs",
    "learner.minibatches", "learner.micro_batches", "eval.problems"))
def test_zero_is_refused_by_name(key):
    config = default_config()
    config.update_from_flattened_dict({key: 0})
    with pytest.raises(ValueError, match=f"config.{key} "):
        check(config)


def test_batch_arithmetic_is_refused_with_what_would_work():
    config = default_config()
    config.prompts.per_step, config.learner.minibatches, config.learner.micro_batches = 12, 2, 4
    with pytest.raises(ValueError, match=r"per_step=12 .*minibatches=2 x learner.micro_batches=4.*\[1, 2, 3, 4, 6, 12\]"):
        check(config)


def test_table_of_the_batch_arithmetic():
    config = default_config()
    config.prompts.per_step, config.sampling.group, config.learner.minibatches, config.learner.epochs = 8, 4, 2, 3
    table = dict(arithmetic_table(config, 16))
    assert table["prompts x completions per step"] == "8 x 4 = 32"
    assert table["updates per step"] == "3 epochs x 2 minibatches = 6"
    assert table["prompts per update"] == "4 in 1 micro-batches"
