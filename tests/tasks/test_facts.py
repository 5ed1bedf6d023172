"""Tasks of boxes and of patches, and the facts of their problems for methods."""
import numpy as np
import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.data.forest import grow, paths, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.rewards.box import find_box
from jaxrl_llm.rewards.swe_rl import swe_rl_reward
from jaxrl_llm.tasks.base import Part, Problem, text_of

SHAPE = {"group": 1, "prompts": 3, "version": 0, "tokens": lambda n: n, "prompt_tokens": lambda n: n}


@pytest.mark.parametrize("name", ["grounding", "edits"])
def test_sides_are_disjoint_and_the_same_each_time(name):
    task, again = tasks.make(name, size=60), tasks.make(name, size=60)
    both = [*task.train, *task.heldout]
    assert both == [*again.train, *again.heldout] and [p.id for p in both] == list(range(len(both)))
    assert not {text_of(p) for p in task.train} & {text_of(p) for p in task.heldout}
    assert both[0] != tasks.make(name, size=60, seed=1).train[0]


def test_boxes_lie_on_their_screen_and_small_ones_weigh_more():
    task = tasks.make("grounding", width=40, height=30, elements=3, size=80)
    both = [*task.train, *task.heldout]
    areas, weights = [], [problem.extra["target_weights"] for problem in both]
    for problem in both:
        *lines, asked = problem.prompt.removesuffix("=").split("\n")
        x1, y1, x2, y2 = map(int, dict(line.split(" ", 1) for line in lines)[asked].split())
        assert (x1, y1, x2, y2) == problem.extra["box"] and 0 <= x1 < x2 < 40 and 0 <= y1 < y2 < 30
        assert problem.answer == f"{x1} {y1} {x2} {y2}" and problem.extra["image"] == (40, 30) and len(lines) == 3
        areas.append((x2 - x1) * (y2 - y1))
    assert min(weights) == 0.5 and max(weights) == 1.5
    np.testing.assert_array_equal(np.argsort(np.argsort(weights)), np.argsort(np.argsort(1 / np.array(areas))))
    with pytest.raises(ValueError, match="elements=13"):
        tasks.make("grounding", elements=13)


def test_worked_example_of_boxes():
    """Three images of 400 x 300, the target itself and moved by four pixels."""
    boxes, reward = [(10, 10, 30, 30), (0, 0, 200, 150), (100, 100, 140, 125)], rewards.make("box")
    problems = [Problem("", "", 0, extra={"box": box, "image": (400, 300)}) for box in boxes]
    moved = [f"({', '.join(str(x + 4) for x in box)})" for box in boxes]
    result = reward.fn([" ".join(map(str, box)) for box in boxes] + moved, [""] * 6, problems * 2)
    np.testing.assert_allclose(result, [1.375] * 3 + [1.241188, 1.351492, 1.275471], rtol=1e-6)
    np.testing.assert_allclose(reward.fn(["", "30 30 10 10", "1 2 3"], [""] * 3, problems), 0)
    assert find_box("at 9: 1,2,3.5,4") == (1, 2, 3.5, 4) and find_box("4 4 2 2") is None
    task = tasks.make("grounding", size=40)
    score = rewards.combine([task.reward])
    outcome = score([p.answer for p in task.train], [p.answer for p in task.train], task.train)
    np.testing.assert_allclose(outcome.total, 1.375)


def test_the_answer_of_a_repository_is_its_patch():
    task = tasks.make("edits", files=2, size=30, heldout=5)
    for problem in [*task.train, *task.heldout]:
        assert swe_rl_reward(problem.answer, "", problem) == 1 and problem.extra["repository"] == 2
        ((path, new),) = problem.extra["new_files"].items()
        old = problem.extra["files"][path]
        assert new != old and all(f"### {name}\n{text}" in problem.prompt for name, text in problem.extra["files"].items())
        line = new.splitlines()[1]
        assert f"{path.removesuffix('.py')}(x) should be {line.removeprefix('    return ')}." in problem.prompt
        wrong = problem.answer.replace(f"{line}\n>>>>>>>", "    return 0\n>>>>>>>")
        assert 0 < swe_rl_reward(wrong, "", problem) < 1 and swe_rl_reward(line, "", problem) == -1
    with pytest.raises(ValueError, match="files=7"):
        tasks.make("edits", files=7)
    assert len(tasks.make("edits", files=1, size=3300, heldout=12).train) == 3300  # all that there are
    with pytest.raises(ValueError, match=r"edits\(files=1\): 3313 problems are asked for, and there are 3312; ask for fewer"):
        tasks.make("edits", files=1, size=3300, heldout=13)


def test_facts_of_problems_are_extras_of_prompts():
    task = tasks.make("grounding", size=20)
    problems = [task.train[i] for i in range(2)]
    forest = plant(problems, [[1], [2, 3]], ["box"], answers=False)
    zeros = np.zeros(2)
    forest = grow(forest, np.arange(2), np.arange(2), dict(role=Role.POLICY, length=np.ones(2, int), stopped=zeros > -1,
                  rewards=zeros, components=zeros[:, None], texts=["", ""], answers=None, tokens=zeros, logprobs=zeros,
                  entropies=zeros, version=zeros))
    result = paths(forest, of_problems=task.facts, **SHAPE).extras["target_weights"]
    assert result.dtype == np.float32 and result.shape == (3,)
    np.testing.assert_allclose(result, [p.extra["target_weights"] for p in [*problems, problems[0]]], rtol=1e-6)
    assert "target_weights" not in paths(forest, **SHAPE).extras


def test_a_mixture_has_the_facts_that_all_tasks_have():
    boxes, sums = (tasks.make(name, **options) for name, options in (("grounding", {"size": 20}), ("arithmetic", {})))
    others = tasks.make("grounding", size=20, seed=5)
    assert tasks.mixture([Part("a", boxes), Part("b", others)]).facts == ("target_weights",)
    assert tasks.mixture([Part("a", boxes), Part("b", sums)]).facts == ()
