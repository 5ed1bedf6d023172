"""Patch similarity: the worked numbers, and answers that are malformed in one way each."""

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.rewards.swe_rl import MAX_CONTENT, apply_edits, diffs, patch_similarity, swe_rl_reward
from jaxrl_llm.tasks.base import Problem

OLD = "x = 1\ny = 2\nz = 3\n"
FILES = {"a.py": OLD, "b.py": "def f():\n    return 1\n"}
PROBLEM = Problem("", "", 0, extra={"files": FILES, "new_files": {"a.py": OLD.replace("y = 2", "y = 20")}})


def edit(path, old, new):
    return f"```python\n### {path}\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"


def answer(*edits, thought="because"):
    return f"<think>{thought}</think>\n<solution>\n{''.join(edits)}</solution>"


def score(completion, problem=PROBLEM):
    return swe_rl_reward(completion, "", problem)


def test_worked_example():
    near = edit("a.py", "y = 2", "y = 21")
    assert score(answer(near)) == pytest.approx(0.977273, abs=1e-6)
    needless = edit("b.py", "    return 1", "    return 2")
    assert score(answer(near, needless)) == pytest.approx(0.488636, abs=1e-6)
    assert score(answer(edit("a.py", "y = 2", "y = 20"))) == 1
    assert score(answer(edit("a.py", "x = 1\ny = 2", "x = 1\ny = 20"))) == 1
    assert score(answer(needless)) == 0


def test_edits_of_one_file_follow_each_other_and_new_files_start_empty():
    assert score(answer(edit("a.py", "y = 2", "y = 5"), edit("a.py", "y = 5", "y = 20"))) == 1
    fresh = Problem("", "", 0, extra={"files": {}, "new_files": {"new.py": "a = 1"}})
    assert score(answer(edit("new.py", "", "a = 1")), fresh) == 1


def test_an_edit_back_to_the_old_text_counts_as_untouched():
    undone = answer(edit("b.py", "    return 1", "    return 2"), edit("b.py", "    return 2", "    return 1"))
    assert score(undone) == 0
    assert score(undone, Problem("", "", 0, extra={"files": FILES, "new_files": {}})) == 1


@pytest.mark.parametrize("completion", [
    "", edit("a.py", "y = 2", "y = 20"),
    answer(edit("a.py", "y = 2", "y = 20"), thought=" \n"),
    answer(edit("a.py", "y = 2", "y = 20")) + "</think>",
    answer("y = 20"),
    answer(edit("a.py", "y = 2", "y = 2")),
    answer(edit("a.py", "= 2", "= 20")),
    answer(edit("b.py", "return 1", "return 2")),
    answer(edit("c.py", "y = 2", "y = 20")),
    answer(edit("a.py", "y = 2", "y = 20"), edit("a.py", "y = 2\n", "y = 3\n")),
    answer(edit("a.py", "", "y = 20")),
    answer(edit("c.py", "", "y = 20"), edit("c.py", "", "z = 3")),
    answer(*[edit("c.py", "x" * bool(n), "\n".join(["x"] * 3000)) for n in range(2)]),
])
def test_malformed_answers(completion):
    assert score(completion) == -1


def test_contents_are_refused_above_a_mebibyte_before_they_are_made():
    lines = "\n".join(["x"] * 512)  # 1,023 characters
    grown = apply_edits({}, [("c.py", "", lines), ("c.py", "x", lines)])["c.py"]
    assert grown.count("\n") == 512 * 512 - 1
    fits = apply_edits({"c.py": grown}, [("c.py", "x", "xyz")])["c.py"]
    assert len(fits) == MAX_CONTENT - 1
    with pytest.raises(ValueError, match="c.py: the file has more than 1048576 characters after the edit"):
        apply_edits({"c.py": grown}, [("c.py", "x", "xyz.")])
    with pytest.raises(ValueError, match="c.py: the file has more"):
        apply_edits({"c.py": grown}, [("c.py", "x", "x" * 2**20)])  # 256 GiB


def test_diffs_have_no_header_and_similarity_is_averaged_over_the_union():
    patch = diffs(FILES, {"a.py": OLD.replace("y = 2", "y = 20"), "b.py": FILES["b.py"]})
    assert patch == {"a.py": "@@ -1,3 +1,3 @@\n x = 1\n-y = 2\n+y = 20\n z = 3"}
    assert patch_similarity({}, {}) == 1 and patch_similarity(patch, {}) == 0
    assert patch_similarity({"a": "abcd", "b": "x"}, {"a": "abxy", "c": "x"}) == pytest.approx(0.5 / 3)


def test_runs_in_a_worker_with_a_deadline():
    reward = rewards.make("isolated", target="jaxrl_llm.rewards.swe_rl:swe_rl_reward", workers=1, deadline=60.0)
    scores = rewards.combine([reward])([answer(edit("a.py", "y = 2", "y = 20")), "no"], ["", ""], [PROBLEM] * 2)
    assert scores.total.tolist() == [1, -1]
    reward.fn.close()


@pytest.mark.slow
def test_a_patch_that_takes_too_long_is_a_bad_one_and_ends_no_run():
    words = "\n".join(f"    return x + {n % 9}" for n in range(20_000))
    problem = Problem("", "", 0, extra={"files": {}, "new_files": {"a.py": words}})
    reward = rewards.make("swe_rl", workers=1, deadline=1.0)
    scores = rewards.combine([reward])([answer(edit("a.py", "", words[::-1])), "no"], [""] * 2, [problem, PROBLEM])
    assert scores.total.tolist() == [-1, -1] and scores.failures == {"swe_rl/timeout": 1}
    reward.fn.close()


def test_problems_without_files_are_an_error():
    for problem in (None, Problem("", "", 0)):
        with pytest.raises(RewardError, match="needs problem.extra.'files'. and .*as the task edits has them"):
            rewards.combine(["swe_rl"])(["no"], [""], [problem])
