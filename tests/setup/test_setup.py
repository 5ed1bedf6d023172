"""Refusals before anything is loaded, and the batches of the supervised warm-up."""
import dataclasses
import json

import numpy as np
import pytest
from published_templates import QWEN3

from jaxrl_llm import methods
from jaxrl_llm.methods import provision
from jaxrl_llm.runs.warmup import demonstrations
from jaxrl_llm.setup import parts, setup, start
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.forecast import forecast
from jaxrl_llm.setup.problems import make_reward, make_task
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers.byte import ByteTokenizer


def test_unmet_needs_name_who_could_provide_them():
    method, parts = methods.get("grpo"), methods.build("grpo")

    def told(row, *parts, given=()):
        return [str(lack) for lack in provision.lacks(row, *parts, given)]

    assert told(method, *parts) == []
    teacher = dataclasses.replace(method, needs=("teacher_logprobs",))
    for changed, words in (
            (teacher, "teacher_logprobs (from the recorder `teacher` with config.teacher.path)"),
            (dataclasses.replace(method, needs=("mood",)), "mood (from a recorder, a topology or a task of your own)"),
            (dataclasses.replace(method, filters="unheard_of"), "filter unheard_of (from a file of jaxrl_llm.control)"),
            (dataclasses.replace(method, needs=("replayed",)), "replayed (from a recorder, a topology or a task of your own)"),
            (dataclasses.replace(method, controllers="tides"), "controller tides (from a file of jaxrl_llm.control)")):
        assert told(changed, *parts) == [words]
    assert told(teacher, *parts, given=("teacher_logprobs",)) == told(teacher, *parts, given=("config.teacher.path",)) == []
    assert told(dataclasses.replace(method, needs=("replayed", "age"), replay="recent_groups"), *parts) == []
    assert told(method, parts[0]._replace(needs=("rewards", "values")), parts[1]) == [
        "values (from the recorder `critic` with estimator.value_targets)"]


def test_the_prompt_length_covers_held_out_problems_too():
    config = default_config()
    config.task = "arithmetic(level=digit)"
    config.model.hidden_size, config.model.num_layers = 32, 1
    run, _ = setup.build(config)
    assert run.source.stream.prompt_tokens == 8  # BOS and "7+5=", rounded up to a multiple of 8
    assert run.needs <= provision.everywhere()


@pytest.mark.slow
@pytest.mark.parametrize("changes", (
    {}, {"method": "ppo"}, {"method": "v0_5", "sampling.max_group": 16}, {"learner.packed_rows": 4},
    {"sampling.group": 8, "sampling.max_tokens": 1024, "prompts.max_tokens": 512},
    {"method": "ppo", "sampling.group": 8, "sampling.max_tokens": 1024, "prompts.max_tokens": 512}),
    ids=("grpo", "critic", "rounds", "packed rows", "long", "long with a critic"))
def test_no_run_compiles_more_than_eight_programs_of_updates(changes):
    """The head of a run says how many; those of a critic count."""
    config = default_config()
    config.task, config.model.hidden_size, config.model.num_layers = "arithmetic(level=digit)", 32, 1
    config.update_from_flattened_dict(changes)
    run, _ = setup.build(config)
    printed = dict(forecast(run))["programs to compile, at most"].split(", ")
    counts = {what: int(count) for count, _, what in (part.partition(" of ") for part in printed)}
    assert 0 < counts["updates"] + counts.get("updates of the critic", 0) <= 8 and 0 < counts["log-probs"] <= 8
    assert ("updates of the critic" in counts) == run.learner.estimator.has_critic


def test_demonstrations_are_answers_with_the_end_token():
    problems = [Problem("7+5=", "12", 3), Problem("99999+1=", "100", 4)]
    rows = demonstrations(problems, ByteTokenizer(), prompt_tokens=10, max_tokens=4, overlong="fail")
    np.testing.assert_array_equal(rows.tokens[:, 0], [[*b"12", 258, 0], [*b"100", 258]])
    assert rows.mask.sum(-1).tolist() == [[3], [4]] and rows.prompt_mask.sum(-1).tolist() == [5, 9]


def test_answers_that_do_not_fit_are_never_imitated_in_part():
    problems = [Problem("7+5=", "12", 3), Problem("999+1=", "1000", 4)]
    message = "solution of problem 4 has 5 tokens with the end token.*sampling.max_tokens=4: '1000'"
    with pytest.raises(ValueError, match=message):
        demonstrations(problems, ByteTokenizer(), prompt_tokens=10, max_tokens=4, overlong="fail")
    assert demonstrations(problems, ByteTokenizer(), 10, 5, "fail").mask.sum(-1).tolist() == [[3], [5]]


def test_demonstrations_of_prompts_that_are_too_long():
    problems = [Problem("99999+1=", "100", 4), Problem("7+5=", "12", 3)]
    def make(policy):
        return demonstrations(problems, ByteTokenizer(), 6, 4, policy)
    with pytest.raises(ValueError, match="prompt 4 has 9 tokens, the limit is prompts.max_tokens=6"):
        make("fail")
    skipped = make("skip")  # the shape stays: the one that fits stands in
    np.testing.assert_array_equal(skipped.prompt_tokens, [[257, *b"7+5=", 0]] * 2)
    np.testing.assert_array_equal(make("truncate").prompt_tokens[0], [257, *b"99+1="])
    with pytest.raises(ValueError, match="no prompt of a warm-up batch fits"):
        demonstrations(problems[:1], ByteTokenizer(), 6, 4, "skip")


def configured(**changes):
    config = default_config()
    config.update_from_flattened_dict({"task": "arithmetic(level=digit)", **changes})
    return config


def reward_of(rewards, score=""):
    config = configured(rewards=rewards, score=score)
    return make_reward(config, make_task(config.task))


def test_a_task_in_a_string(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(20)))
    task = make_task(f"jsonl(path={file}, heldout_fraction=0.5)")
    assert len(task.train) + len(task.heldout) == 20 and task.train[0].prompt.endswith("+1=") and task.reward == "boxed"
    assert make_task("arithmetic").train[0].level == "digit"
    with pytest.raises(ValueError, match="keyword of task 'jsonl' 'pth'. Did you mean 'path'"):
        make_task("jsonl(pth=x)")
    with pytest.raises(ValueError, match="names no task; give arithmetic, attempts, dataset, jsonl"):
        make_task("")


@pytest.mark.slow
def test_a_reasoning_gym_task_in_a_string():
    pytest.importorskip("reasoning_gym")
    task = make_task("reasoning_gym(dataset=chain_sum, train_size=5, heldout_size=3, config={'max_terms': 2})")
    assert len(task.train) == 5 and task.name == "reasoning_gym/chain_sum"
    reward = make_reward(configured(), task)  # no rewards given: the task's own
    problem = task.train[0]
    assert [part.name for part in reward.rewards] == ["reasoning_gym"]
    assert reward([f"<answer>{problem.answer}</answer>"], [problem.answer], [problem]).total[0] == 1.0


def test_the_score_is_the_first_component():
    def names(*given):
        return [part.name for part in reward_of(*given).rewards]
    assert names("") == ["exact"]
    assert names("exact(weight=0.1), format(pattern='a+')") == ["format", "exact"]
    assert names("format(pattern='a+'), numeric(weight=0.3), exact", "exact") == ["exact", "format", "numeric"]
    assert names("format(pattern='a+'), exact(weight=0.1)", "exact") == ["exact", "format"]
    scores = reward_of("format(pattern='1+', weight=0.25), exact")(["11", "12"], ["12", "12"])
    assert scores.total.tolist() == [0.25, 1.0] and scores.components[:, 0].tolist() == [0, 1]


def test_a_score_that_is_not_clear_is_refused():
    with pytest.raises(ValueError, match="rewards exact, format have the same weight; set config.score"):
        reward_of("exact, format(pattern='a+'), numeric(weight=0.5)")
    with pytest.raises(ValueError, match="reward for config.score 'exakt'. Did you mean 'exact'"):
        reward_of("exact, numeric", "exakt")
    with pytest.raises(ValueError, match="reward 'exat'. Did you mean 'exact'"):
        reward_of("exat")


def test_methods_that_compare_answers_need_a_reward_that_reads_them():
    small = {"method": "ttrl", "model.hidden_size": 32, "model.num_layers": 1}
    with pytest.raises(ValueError, match="'ttrl' compares the answers .* 'format' does not extract an answer"):
        setup.build(configured(rewards="format(pattern='a+'), exact(weight=0.1)", **small))
    run, _ = setup.build(configured(rewards="format(pattern='a+'), exact(weight=0.1)", score="exact", **small))
    assert run.needs >= {"answers"} and run.needs <= provision.everywhere()


def test_a_methods_own_epochs_and_minibatches():
    small = {"model.hidden_size": 32, "model.num_layers": 1}
    run, _ = setup.build(configured(method="gspo", **small))
    assert (run.config.learner.epochs, run.config.learner.minibatches) == (1, 4)
    assert (run.learner.epochs, run.learner.minibatches) == (1, 4)
    run, _ = setup.build(configured(method="gspo", **small, **{"learner.minibatches": 1}))
    assert run.learner.epochs == run.learner.minibatches == 1


def test_parts_are_made_once_and_before_weights_are_read(monkeypatch):
    """For the model's own width, which is not that of the configuration; a refusal comes before the weights too."""
    order, make_parts, open_model = [], parts.make_parts, setup.open_model

    def made(config, hidden_size, *around):
        order.append(f"parts for {hidden_size}")
        return make_parts(config, hidden_size, *around)

    def opened(m):
        tokenizer, model, read = open_model(m)
        return tokenizer, model, lambda *where: order.append("weights") or read(*where)

    monkeypatch.setattr(parts, "make_parts", made)
    monkeypatch.setattr(setup, "open_model", opened)
    monkeypatch.setitem(start.MODELS, "tiny", start.model_config(configured(
        **{"model.hidden_size": 32, "model.num_layers": 1, "model.mlp_size": 16}).model, 260))
    setup.build(configured(method="poise", **{"model.sizes": "tiny"}))
    assert order == ["parts for 32", "weights"]
    with pytest.raises(NotImplementedError, match="needs teacher_logprobs"):
        setup.build(configured(method="kepo", **{"model.sizes": "tiny"}))
    assert order == ["parts for 32", "weights", "parts for 32"]


def test_variables_of_the_chat_template_reach_a_run_and_those_that_start_with_it(tmp_path):
    config, messages = default_config(), [{"role": "user", "content": "2+2?"}]
    config.model.chat_template, config.model.chat_template_kwargs = QWEN3, "enable_thinking=False"
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, "config": config.to_dict()}))
    later, other = default_config(), default_config()
    later.model.path = other.model.path = str(tmp_path)
    other.model.chat_template_kwargs = "enable_thinking=True"
    thinks, brief = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for one, end in ((config, brief), (later, brief), (other, thinks)):
        assert start.open_model(one.model)[0].render_chat(messages).endswith(end)
    other.model.chat_template_kwargs = "enable_thinkin=True"
    with pytest.raises(ValueError, match="'enable_thinkin' is no variable that the chat templates"):
        start.open_model(other.model)
