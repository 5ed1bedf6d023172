"""A run on two tasks with an evaluation set and the best weights: numbers by task, resumed bit for bit."""
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop, trained
from jaxrl_llm.sampling.stages.draw import problems
from jaxrl_llm.setup import setup

TASKS = ("arithmetic(level=digit, label=sums, reward=\"format(pattern='(?s).*[a-z].*')\"), "
         "arithmetic(level=mul, label=products, reward=\"format(pattern='(?s).*[A-Z].*')\")")
SETS = ("arithmetic(level=add2, label=hard, problems=3, temperature=0, every=2, reward=\"format(pattern='(?s).*[a-z].*')\"), "
        "arithmetic(level=sub2, label=many, problems=3, samples=6, temperature=1, top_p=0.000001, max_tokens=9)")


def config(**changes):
    c = tiny_config.get_config()
    c.task, c.rewards, c.method, c.eval.sets, c.checkpoint.best = TASKS, "", "qwenlong_l15_adv", SETS, "eval/score"
    c.controllers = "none"  # or problems are drawn by their pass rates, and tasks not in turns
    c.steps, c.eval.every, c.checkpoint.every = 4, 4, 2
    c.update_from_flattened_dict(changes)
    return c


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("mixture")
    return workdir, loop.train(config(), workdir)


@pytest.mark.slow
def test_numbers_are_given_by_task_and_set(straight):
    workdir, evaluations = straight
    result = run_files.lines(workdir)
    assert [line["step"] for line in result] == list(range(5))
    for line in result[1:]:
        assert line["task/sums/prompts"] == line["task/products/prompts"] == 2
        assert line["reward/score"] == pytest.approx((line["task/sums/score"] + line["task/products/score"]) / 2)
    assert all(("eval/score" in line) == (line["step"] in (0, 4)) for line in result)
    assert all(("eval/hard/score" in line) == (line["step"] in (0, 2, 4)) for line in result)
    last = result[-1]
    assert 6 < result[0]["eval/many/length"] <= 9, "completions of this set may be longer than the 6 of training"
    assert last["eval/score"] == pytest.approx((last["eval/sums/score"] + last["eval/products/score"]) / 2)
    assert set(evaluations["after"].by_task) == {"sums", "products"}
    for label, step, number in (("hard", 2, 12), ("many", 4, 18)):  # groups have 4 completions
        page = (workdir / "eval" / label / "samples" / f"step_{step:06}.txt").read_text()
        texts = [line for line in page.splitlines() if line and not line.startswith(("-", "=", "step", "prompt"))]
        assert f"3 prompts, {number} completions" in page and len(set(texts)) <= 6  # the likeliest tokens: one for a problem


@pytest.mark.slow
def test_the_best_weights_are_kept(straight, tmp_path):
    workdir, _ = straight
    scores = {line["step"]: line["eval/score"] for line in run_files.lines(workdir) if "eval/score" in line}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert [path.name for path in (workdir / "best").iterdir() if path.name.isdecimal()] == [str(best)]
    kept = trained.trained(workdir, best=True)
    assert kept.step == best and trained.trained(workdir).step == 4
    same = trained.trained(workdir, step=best) if best else None
    if same is not None:
        np.testing.assert_array_equal(kept.params["embed"], same.params["embed"])
    with pytest.raises(ValueError, match="Unknown metric for config.checkpoint.best 'eval/scor'. Did you mean 'eval/score'"):
        loop.train(config(**{"checkpoint.best": "eval/scor"}), tmp_path)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    workdir, _ = straight
    loop.train(config(steps=3), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 3 -> 4"):
        loop.train(config(), tmp_path, resume=True)
    run_files.assert_same(*(run_files.saved(one, config()) for one in (tmp_path, workdir)))
    repeatable = [run_files.repeatable(run_files.lines(one)[-1]) for one in (tmp_path, workdir)]
    assert repeatable[0] == repeatable[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scalerl", "rapo_curriculum", "vade", "grpo"])
def test_curricula_leave_each_task_its_share(method):
    """Tasks of 82 and some thousand problems with weights 3 and 1: of 400 prompts 300 are of the small task, by any method."""
    c = config(method=method, task="arithmetic(level=digit, label=small, weight=3), arithmetic(level=add2, label=large)",
               **{"prompts.per_step": 8, "eval.sets": "", "checkpoint.best": ""})
    run, params = setup.build(c)
    state = setup.initial_state(run, params)
    knobs = run.learner.controls.proposed(state.control)
    labels = [problem.level.split("/")[0] for _ in range(50) for problem in problems(run.source, state.key, knobs)(0, 8)]
    assert len(labels) == 400 and labels.count("small") == pytest.approx(300, abs=30 if method == "scalerl" else 0)
