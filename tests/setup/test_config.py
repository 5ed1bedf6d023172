"""Defaults, hyper-parameters in a string, and refusals before anything is loaded."""
import pytest

from jaxrl_llm.runs import loop
from jaxrl_llm.setup.check import check
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.tables import arithmetic_table, paper_table, replaced_table
from jaxrl_llm.tools.written import calls, keywords


def test_defaults_pass_and_are_locked_against_typing_errors():
    config = default_config()
    check(resolve(config, {}))
    with pytest.raises(AttributeError, match="batch_size"):
        config.prompts.batch_size = 3


@pytest.mark.parametrize("text, wanted", (
    ("", {}), ("  ", {}), ("eps=1e-4", {"eps": 1e-4}), ("dual_clip=3.5, clip_high=0.28", {"dual_clip": 3.5, "clip_high": 0.28}),
    ("path=data/a-1.jsonl", {"path": "data/a-1.jsonl"}), ("pattern='a, b=(c'", {"pattern": "a, b=(c"}),
    ("aggregation=token_mean", {"aggregation": "token_mean"}),
    ("aggregation='token_mean',max_len=None", {"aggregation": "token_mean", "max_len": None}),
    ("levels=(1, 2), whiten=True", {"levels": (1, 2), "whiten": True}), ("a = 1 , b = -2", {"a": 1, "b": -2}),
    ("a=1,", {"a": 1})))
def test_keywords(text, wanted):
    assert keywords(text) == wanted


@pytest.mark.parametrize("text", ("0.1", "dual_clip 0.1", "=3", "a=", "a=1, 2b=3, =4", "a=1 b=2", "a=1, a=2", "a=(1"))
def test_keywords_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="write options as name=value"):
        keywords(text)


@pytest.mark.parametrize("text, wanted", (
    ("", []), ("exact", [("exact", {})]), ("exact,boxed( )", [("exact", {}), ("boxed", {})]),
    ("boxed(deadline=3), format(pattern='(a, b)|c', weight=0.2)",
     [("boxed", {"deadline": 3}), ("format", {"pattern": "(a, b)|c", "weight": 0.2})]),
    ("reasoning_gym(dataset=chain_sum, config={'min_terms': 2, 'max_terms': 3})",
     [("reasoning_gym", {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 3}})])))
def test_calls(text, wanted):
    assert calls(text) == wanted


@pytest.mark.parametrize("text", ("exact boxed", "exact=1", "(exact)", "exact(weight=1", "0.2 * exact"))
def test_calls_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"write name, or name\(option=value, option=value\)"):
        calls(text)


@pytest.mark.parametrize("key", (
    "steps", "prompts.per_step", "sampling.group", "sampling.max_tokens", "sampling.max_draws", "learner.epochs",
    "learner.minibatches", "learner.micro_batches"))
def test_zero_is_refused_by_name(key):
    config = resolve(default_config(), {})
    config.update_from_flattened_dict({key: 0})
    with pytest.raises(ValueError, match=f"config.{key} "):
        check(config)


@pytest.mark.parametrize("key, value, words", (
    ("learner.max_skipped", 0, "config.learner.max_skipped is 0; it must be at least 1"),
    ("optimizer.clip_norm", -1.0, "config.optimizer.clip_norm is -1.0; it must be at least 0"),
    ("optimizer.learning_rate", -1e-4, "config.optimizer.learning_rate is -0.0001; it must be at least 0"),
    ("optimizer.learning_rate", float("nan"), "config.optimizer.learning_rate is nan"),
    ("warmup.learning_rate", -1e-4, "config.warmup.learning_rate"), ("warmup.batch", 0, "config.warmup.batch"),
    ("eval.every", -1, "config.eval.every is -1; it must be at least 0"), ("checkpoint.every", -5, "config.checkpoint.every"),
    ("checkpoint.keep", 0, "config.checkpoint.keep"), ("samples_every", -1, "config.samples_every"),
    ("prompts.max_tokens", -1, "config.prompts.max_tokens is -1"), ("model.num_layers", 0, "config.model.num_layers"),
    ("optimizer.momentum", 1.0, "config.optimizer.momentum is 1.0; give a decay below 1, for example 0.99, or 0: none"),
    ("optimizer.b2", 1.0, "config.optimizer.b2 is 1.0; give 0 or more and less than 1, or -1: the optimiser's own"),
    ("reward_deadline", 0.0, "config.reward_deadline is 0.0; give a number of seconds above 0"),
    ("server.reload", "vlm", "Unknown config.server.reload 'vlm'. Did you mean 'vllm'?"),
    ("prompts.overlong", "skp", "Unknown config.prompts.overlong 'skp'. Did you mean 'skip'?"),
    ("learner.offload", "optimiser", "Unknown config.learner.offload 'optimiser'. Did you mean 'optimizer'?")))
def test_values_that_cannot_work_are_refused_by_name(key, value, words):
    config = resolve(default_config(), {})
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError) as refusal:
        check(config)
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize("key, name, value, words", (
    ("name", "adamw", "muom", "Unknown config.optimizer.name 'muom'. Did you mean 'muon'? Allowed: adafactor, adam, adamw,"),
    ("weight_decay", "sgd", 0.1, "config.optimizer.weight_decay is 0.1, but sgd has no weight_decay: leave it at 0.0, or take "
                                 "one of adamw, lion, muon, adafactor"),
    ("momentum", "adamw", 0.9, "config.optimizer.momentum is 0.9, but adamw has no momentum: leave it at 0.0, or take one of "
                               "rmsprop, sgd"),
    ("b1", "adafactor", 0.9, "config.optimizer.b1 is 0.9, but adafactor has no b1: leave it at -1.0, or take one of adamw,")))
def test_settings_that_an_optimiser_does_not_have_are_refused(key, name, value, words):
    config = default_config()
    config.optimizer.name = name
    config.optimizer[key] = value
    with pytest.raises(ValueError) as refusal:
        resolve(config, {})
    assert str(refusal.value).startswith(words)


@pytest.mark.parametrize("name, given, used", (("adamw", (-1.0, -1.0), (0.9, 0.999)), ("lion", (-1.0, -1.0), (0.9, 0.99)),
                                               ("adam", (0.0, 0.95), (0.0, 0.95)), ("sgd", (-1.0, -1.0), (-1.0, -1.0))))
def test_an_optimiser_has_its_own_settings(name, given, used):
    config = default_config()
    config.optimizer.name, (config.optimizer.b1, config.optimizer.b2) = name, given
    result = resolve(config, {})
    assert (result.optimizer.b1, result.optimizer.b2) == used
    assert resolve(result, {}).to_dict() == result.to_dict()


def test_batch_arithmetic_is_refused_with_what_would_work():
    config = resolve(default_config(), {})
    config.prompts.per_step, config.learner.minibatches, config.learner.micro_batches = 12, 2, 4
    with pytest.raises(ValueError, match=r"per_step=12 .*minibatches=2 x learner.micro_batches=4.*\[1, 2, 3, 4, 6, 12\]"):
        check(config)


@pytest.mark.parametrize("prompts, micro_batches, wanted, used", (
    (8, 1, 4, 4), (8, 1, 16, 8), (12, 1, 5, 4), (7, 1, 4, 1), (12, 3, 4, 4), (12, 4, 16, 3), (8, 3, 4, 1), (32, 1, 16, 16)))
def test_a_methods_minibatches_are_cut_down_to_what_divides(prompts, micro_batches, wanted, used):
    config = default_config()
    config.prompts.per_step, config.learner.micro_batches = prompts, micro_batches
    assert resolve(config, {"minibatches": wanted}).learner.minibatches == used
    assert config.learner.minibatches == 0  # the given configuration stays as it is


def test_numbers_that_are_given_win_over_those_of_the_method():
    config = default_config()
    assert resolve(config, {}).learner.to_dict() | {"epochs": 1, "minibatches": 1} == resolve(config, {}).learner.to_dict()
    assert resolve(config, {"epochs": 3, "group_size": 64}).learner.epochs == 3
    config.learner.epochs, config.learner.minibatches = 1, 3  # 8 prompts: not cut down but refused
    result = resolve(config, {"epochs": 3, "minibatches": 4})
    assert (result.learner.epochs, result.learner.minibatches) == (1, 3)
    with pytest.raises(ValueError, match="minibatches=3"):
        check(result)
    assert resolve(result, {"epochs": 3, "minibatches": 4}).to_dict() == result.to_dict()  # as on a resume


def test_table_of_the_batch_arithmetic():
    config = default_config()
    config.prompts.per_step, config.sampling.group, config.learner.minibatches, config.learner.epochs = 8, 4, 2, 3
    table = dict(arithmetic_table(config, 16))
    assert table["prompts x completions per step"] == "8 x 4 = 32"
    assert table["epochs x minibatches per step"] == "3 x 2 = 6"
    assert table["prompts per update"] == "4 in 1 micro-batches"


def test_values_that_the_setting_of_the_paper_replaces():
    c, defaults = default_config(), {"group_size": 2, "temperature": 1.0, "epochs": 2, "max_group": 40, "buffer": 7}
    c.sampling.group = 8
    assert replaced_table(c, defaults) == []  # nothing is replaced without the setting
    c.setting = "paper"
    assert replaced_table(c, defaults) == [("group_size of the paper", "2 (sampling.group was 8)"),
                                           ("max_group of the paper", "40 (sampling.max_group was 32)")]
    c.learner.epochs = 1
    assert ("epochs of the paper", "2 (learner.epochs was 1)") in replaced_table(c, defaults)  # 0 is the method's own
    assert replaced_table(resolve(c, defaults), defaults) == [] and replaced_table(c, {"buffer": 7}) == []


@pytest.mark.slow
def test_the_head_of_a_run_says_what_the_setting_of_the_paper_replaces(tmp_path, capsys):
    c = default_config()
    c.update_from_flattened_dict({
        "method": "poise", "setting": "paper", "sampling.group": 8, "sampling.max_tokens": 2, "steps": 1, "prompts.per_step": 2,
        "model.hidden_size": 8, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_size": 8, "eval.problems": 1})
    loop.train(c, tmp_path / "replaced")
    assert f"{'group_size of the paper':32}2 (sampling.group was 8)\n" in capsys.readouterr().out
    c.sampling.group = 2
    loop.train(c, tmp_path / "same")
    assert "of the paper" not in capsys.readouterr().out


def test_the_setting_of_the_paper_has_options_of_the_environment():
    defaults = {"environment": "tool_use(tools={'python': {'brief': 512}}, void_ends=True)"}
    c = default_config()
    c.environment = "tool_use(task='words', tools=('python',))"
    whole = "tool_use(task='words', tools={'python': {'brief': 512}}, void_ends=True)"
    (name, text), = paper_table(resolve(c, defaults), defaults)
    assert name == "environment of the paper" and text.endswith(f"yours: {c.environment} (environment)")
    c.setting = "paper"
    theirs = resolve(c, defaults)
    assert theirs.environment == whole and paper_table(theirs, defaults) == []
    for other in ("", "treasure(size=3)"):
        c.environment = other
        assert resolve(c, defaults).environment == other, "another environment stays as it is"


def test_the_setting_of_the_paper_and_what_differs_from_it():
    c, defaults = default_config(), {"group_size": 5, "temperature": 1.3, "epochs": 2, "buffer": 7}
    mine = resolve(c, defaults)
    assert mine.sampling.group == 8 and mine.sampling.max_group == 32 and mine.learner.epochs == 2
    assert paper_table(mine, defaults) == [("group_size of the paper", "5, yours: 8 (sampling.group)"),
                                           ("temperature of the paper", "1.3, yours: 1.0 (sampling.temperature)"),
                                           ("buffer of the paper", "7, which no key sets")]
    c.setting = "paper"
    theirs = resolve(c, defaults)
    assert (theirs.sampling.group, theirs.sampling.max_group, theirs.sampling.temperature) == (5, 20, 1.3)
    assert paper_table(theirs, defaults) == [("buffer of the paper", "7, which no key sets")]
    assert resolve(theirs, defaults) == theirs and resolve(theirs, {}) == theirs  # as a run folder is read
    c.sampling.max_group = 12
    assert resolve(c, defaults).sampling.max_group == 12  # no multiple of the group
    assert resolve(c, defaults | {"max_group": 40}).sampling.max_group == 40
    c.setting = ""
    assert resolve(c, defaults).sampling.max_group == 12
    c.setting = "papr"
    with pytest.raises(ValueError, match="Did you mean 'paper'"):
        resolve(c, defaults)
