"""Several tasks in one run: shares of batches, ids, held-out problems, and the rewards of each."""
import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.sampling import by_task
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.problems import make_reward, make_sets, make_task
from jaxrl_llm.tasks.base import front_of, question_of, seeded
from jaxrl_llm.tasks.loader import batches


def two(weight=1):
    return make_task("arithmetic(level=digit, label=digit), arithmetic(level=mul2, label=mul, size=300, "
                           f"weight={weight}, reward=\"numeric, format(pattern='.*', weight=0.5)\")")


def stream(task, size, count, **where):
    loader = batches(task.train, size, seed=0, **where)
    return loader, [[problem for problem in next(loader)] for _ in range(count)]


def test_ids_levels_and_held_out_problems_of_both():
    task = two()
    first, second = (part.task for part in task.parts)
    assert [p.id for p in [*task.train, *task.heldout]] == list(range(100 + 300))
    assert task.train[82].prompt == second.train[0].prompt and task.train[82].task == 1 and task.train[81].task == 0
    assert task.heldout[0].prompt == first.heldout[0].prompt and task.heldout[0].id == len(task.train)
    assert {p.level for p in task.train} == {"digit/digit", "mul/mul2"} and task.train[-1] == task.train[len(task.train) - 1]
    chosen = held_out(task.heldout, 9)
    assert Counter(p.task for p in chosen) == {0: 5, 1: 4}
    assert {p.id for p in chosen} < {p.id for p in held_out(task.heldout, 20)}  # more problems have these among them
    with pytest.raises(IndexError, match="problem 400 of a source of"):
        task.train[400]


@pytest.mark.parametrize("problems, counts", [(8, {0: 3, 1: 5}), (7, {0: 3, 1: 4}), (5, {0: 3, 1: 2}), (31, {0: 3, 1: 28}),
                                              (100, {0: 3, 1: 30})])
def test_what_a_small_task_lacks_is_measured_on_the_others(problems, counts):
    task = two()
    sides = tuple(side[:size] for side, size in zip((list(side) for side in task.heldout.sides), (3, 30)))
    source = dataclasses.replace(task.heldout, sides=sides)
    chosen = held_out(source, problems)
    assert Counter(p.task for p in chosen) == counts and len({p.id for p in chosen}) == len(chosen)
    assert {p.id for p in chosen} <= {p.id for p in held_out(source, problems + 1)}


@pytest.mark.parametrize("weight, shares", [(1, {0: 4, 1: 4}), (3, {0: 2, 1: 6})])
def test_every_batch_has_the_share_of_every_task(weight, shares):
    task = two(weight)
    _, result = stream(task, 8, 60)
    assert all(Counter(p.task for p in batch) == shares for batch in result)
    seen = [p.id for batch in result for p in batch if p.task == 0]
    assert sorted(seen[:82]) == list(range(82))  # every problem of a task once, before one comes again


def test_the_remainder_rotates():
    task = make_task("arithmetic(label=a), arithmetic(label=b, level=mul2), arithmetic(label=c, level=add3)")
    _, result = stream(task, 4, 6)
    counts = np.array([[sum(p.task == k for p in batch) for k in range(3)] for batch in result])
    assert ((counts >= 1) & (counts <= 2)).all() and counts.sum(0).tolist() == [8, 8, 8]


def test_a_position_in_a_mixture_is_restored_exactly_and_shared_by_processes():
    task = two(2)
    loader, whole = stream(task, 6, 3)
    position = json.loads(json.dumps(loader.get_state()))
    rest = [[p.id for p in next(loader)] for _ in range(30)]
    again = batches(task.train, 6, seed=0)
    again.set_state(position)
    assert [[p.id for p in next(again)] for _ in range(30)] == rest
    shards = [stream(task, 6, 3, process_index=i, process_count=2)[1] for i in range(2)]
    for k, batch in enumerate(whole):
        assert sorted(p.id for shard in shards for p in shard[k]) == sorted(p.id for p in batch)
    with pytest.raises(ValueError, match="tasks="):
        batches(two(3).train, 6, seed=0).set_state(position)


def test_each_completion_is_scored_by_the_rewards_of_its_task():
    task = two()
    reward = make_reward(default_config(), task)
    assert reward.names == ("score", "mul/format") and reward.solved_above == (0.5, 0.5) and reward.by_row and reward.extracts
    sum_, product = task.train[0], task.train[82]
    texts = [sum_.answer, f"so {sum_.answer}", product.answer, f"{product.answer}.0", "x"]
    problems = [sum_, sum_, product, product, product]
    result = reward(texts, [p.answer for p in problems], problems)
    np.testing.assert_array_equal(result.total, [1, 0, 1.5, 1.5, 0.5])  # `exact` of sums, `numeric` and `format` of products
    np.testing.assert_array_equal(result.components, [[1, np.nan], [0, np.nan], [1, 1], [1, 1], [0, 1]])
    assert result.seconds.shape == (3,) and reward.extract("12", product) == 12 and reward.extract("12", sum_) == "12"
    config = default_config()
    config.rewards = "last_number"
    assert make_reward(config, task).names == ("last_number",)  # given for all
    config.rewards, config.score = "", "exact"
    with pytest.raises(ValueError, match="config.score='exact' is one for all tasks, but each of digit, mul has rewards"):
        make_reward(config, task)


def test_thresholds_and_metrics_are_those_of_each_task():
    problems = [tasks.Problem("a", "1", 0), tasks.Problem("b", "2", 1, task=1)]
    forest = forests.plant(problems, [[1], [2]], ("score", "b/format"), answers=False, solved_above=(0.5, 0.99))
    forest = forests.grow(forest, [0, 0, 1, 1], [0, 1, 2, 3], dict(role=Role.POLICY, length=[1, 3, 2, 2], stopped=[True] * 4,
                          rewards=[0.8, 0, 1.8, 1], components=[[0.8, np.nan], [0, np.nan], [0.8, 1], [1, 0]],
                          texts=["x"] * 4, answers=None, tokens=[5] * 8, logprobs=[-1.0] * 8, entropies=[1.0] * 8,
                          version=[0] * 8))
    assert forest.solved[forest.ends].tolist() == [True, False, False, True]
    same = dataclasses.replace(forest, solved_above=(0.99,))  # of one reward for all tasks
    assert same.solved[forest.ends].tolist() == [False, False, False, True]
    result = by_task.metrics(forest, ["a", "b", "c"])
    expected = {"a": (1, 0.4, 0.4, 0.5, 2), "b": (1, 1.4, 0.9, 0.5, 2)}
    for label, values in expected.items():
        for name, value in zip(("prompts", "reward", "score", "solved", "length"), values):
            assert result[f"task/{label}/{name}"] == pytest.approx(value)
    assert result["task/c/prompts"] == 0 and "task/c/score" not in result
    assert forests.metrics(forest)["reward/b/format"] == 0.5  # over the completions that have it
    rollouts = forests.paths(forest, group=2, prompts=3, tokens=lambda n: n, prompt_tokens=lambda n: n, version=0)
    assert rollouts.extras["task"].tolist() == [0, 1, 0] and rollouts.reward_components[0, :, 1].tolist() == [0, 0]


@pytest.mark.parametrize("text, message", [
    ("arithmetic(level=digit), arithmetic(level=mul2)", "different names without a slash, got arithmetic, arithmetic; give"),
    ("arithmetic(level=digit, label=a, weight=0), arithmetic(level=mul2)", "weight of task 'a' is 0; give a number above 0"),
    ("arithmetic(level=digit, label=a), arithmetic(level=digit, heldout_fraction=0.5, label=b)",
     "task 'b' holds out a prompt that task 'a' trains on, '0[+]4='"),
])
def test_impossible_mixtures_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make_task(text)


@pytest.mark.parametrize("options", [{}, {"system": "Be short."}, {"shots": 1}, {"prompt": " {question}\n"}, {"chat": False}])
def test_a_prompt_is_the_same_behind_a_system_message_and_examples(tmp_path, options):
    rows = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def part(label, heldout, **more):
        return tasks.Part(label, tasks.make("dataset", path=str(tmp_path / "rows.jsonl"), heldout=heldout,
                                            **{"prompt": "{question}"} | more))

    with pytest.raises(ValueError, match="task 'b' holds out a prompt that task 'a' trains on"):
        tasks.mixture([part("a", 0.2), part("b", 0.5, **options)])
    if "prompt" not in options:  # the words of the prompts choose the split
        assert len(tasks.mixture([part("a", 0.2), part("b", 0.2, **options)]).train) > 50


def test_problems_of_seeds_are_told_apart_by_them():
    games = [tasks.Part(label, seeded("game", "Play.", train, 5)) for label, train in (("a", 20), ("b", 20), ("c", 23))]
    assert len(tasks.mixture(games[:2]).train) == 40
    with pytest.raises(ValueError, match="task 'a' holds out a prompt that task 'c' trains on, 'Play.'"):
        tasks.mixture([games[0], games[2]])


def test_questions_are_what_is_asked_behind_what_all_problems_begin_with():
    def chat(*contents):
        roles = ("system", "user", "assistant", "user")
        return tasks.Problem(tuple({"role": role, "content": text} for role, text in zip(roles, contents)), "1", 0)

    shown = [chat("Be short.", "1?", "1", text) for text in ("2?", "3?")]
    assert front_of(shown) == 3 and [question_of(one, 3) for one in shown] == ["2?", "3?"]
    same_end = [chat("Text A", "Sum it up."), chat("Text B", "Sum it up.")]
    assert front_of(same_end) == 0 and question_of(same_end[0]) == "text a sum it up."
    assert front_of(shown[:1]) == 3 and front_of([]) == 0 and front_of([*shown, tasks.Problem("2?", "2", 0)]) == 0
    assert question_of(tasks.Problem(" What  IS\n2? ", "2", 0)) == "what is 2?"
    assert question_of(tasks.Problem("2?", "2", 0, extra={"seed": 3})) == "2?"  # a column of a data set


def test_evaluation_sets():
    config, task = default_config(), two()
    config.eval.sets = "arithmetic(level=add2, label=hard, problems=5, temperature=0, every=20, reward=numeric), "
    config.eval.sets += "arithmetic(max_tokens=4, samples=64, top_p=0.95)"
    hard, other = make_sets(config, task)
    assert (hard.label, hard.problems, hard.every, hard.temperature, hard.max_tokens) == ("hard", 5, 20, 0, None)
    assert (hard.samples, hard.top_p, other.samples, other.top_p) == (None, None, 64, 0.95)
    assert hard.reward.names == ("numeric",) and other.reward.names == ("exact",)
    assert (other.label, other.problems, other.every, other.max_tokens) == ("arithmetic", 64, 0, 4)
    for text, message in (("arithmetic(label=mul)", "set 'mul' needs a name of its own"),
                          ("arithmetic(problems=0)", "problems=0, every=0, samples=None, temperature=None, top_p=None, max_to"),
                          ("arithmetic(samples=0)", "samples=0, .*; problems, samples and max_tokens are at least 1"),
                          ("arithmetic(top_p=0)", "top_p=0, .*top_p above 0 and at most 1"),
                          ("arithmetic(top_p=1.1)", "top_p=1.1, .*top_p above 0 and at most 1"),
                          ("arithmetic(max_tokens=0)", "max_tokens=0; problems, samples and max_tokens are at least 1"),
                          ("arithmetic(tempreature=0)", "keyword of task 'arithmetic' 'tempreature'")):
        config.eval.sets = text
        with pytest.raises(ValueError, match=message):
            make_sets(config, task)


@pytest.mark.parametrize("text", ["arithmetic(level=digit)", "arithmetic(label=a), arithmetic(level=mul2, label=b)"])
def test_evaluation_sets_that_are_trained_on_are_refused(text):
    config, task = default_config(), make_task(text)
    trained = {tasks.text_of(problem) for problem in task.train}
    config.eval.sets = "arithmetic(level=sub2, label=good), arithmetic(heldout_fraction=0.5, label=other)"
    asked = [tasks.text_of(problem) for problem in tasks.make("arithmetic", heldout_fraction=0.5).heldout]
    shared = len(trained & {*asked})
    assert 0 < shared < len(asked)
    with pytest.raises(ValueError, match=f"{shared} of {len(asked)} problems of the evaluation set 'other' are trained on, for "
                                         "example '.*'; take another split"):
        make_sets(config, task)


def test_rewards_of_a_mixture_are_one_batch_for_each_task():
    """The deadline of a batch includes the time of its earlier parts, reward by reward."""
    spent = []

    def remember(completions, answers, problems, until):
        spent.append(until)
        return np.zeros(len(completions))

    slow = rewards.Reward("slow", remember, per="batch", timed=True)
    both = rewards.ByTask(("a", "b"), (rewards.Combined((slow,), deadline=100.0), rewards.Combined((slow,), deadline=100.0)))
    problems = [tasks.Problem("a", "1", 0), tasks.Problem("b", "2", 1, task=1)]
    both(["x", "y"], ["1", "2"], problems, None, np.array([90.0, 0.0]))
    assert 80 < spent[1] - spent[0] <= 91
    both.part(0.5)(["x", "y"], ["1", "2"], problems, None, np.array([90.0, 0.0]))
    assert 40 < spent[3] - spent[2] <= 46
