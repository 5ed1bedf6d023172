"""Hints that contain the answer, on a forest that is written by hand."""
from streams import BYTES

from jaxrl_llm.data.forest import grow, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.sampling.stages.hints import gives_away, hints_of
from jaxrl_llm.tasks.base import Problem

PROBLEM = Problem("12+30=", "42", 0)


def test_hints_are_what_a_trajectory_begins_with_or_reads_and_the_policy_goes_on_behind():
    """Of the policy alone, behind a hint, behind half of a trace, a whole trace, under another text."""
    forest = plant([PROBLEM], [[1]], ["exact"], answers=False)
    words = ["7", "sum: 42.", "8", "4", "2", "42", "9"]
    roles = [Role.POLICY, Role.HINT, Role.POLICY, Role.EXPERT, Role.POLICY, Role.EXPERT, Role.ELSEWHERE]
    count = sum(map(len, words))
    forest = grow(forest, [0, 0, 2, 0, 4, 0, 0], [0, 1, 1, 2, 2, 3, 4], {
        "prompt": [0] * 7, "role": roles, "length": [*map(len, words)], "stopped": [True] * 7, "rewards": [0] * 7,
        "components": [[0]] * 7, "texts": words, "tokens": [*"".join(words).encode()], "logprobs": [0] * count,
        "entropies": [0] * count, "version": [0] * count, "reads": [None] * 6 + [[*b"It is 42: 12+30="]]})
    found = hints_of(forest, BYTES)
    assert found == {3: "sum: 42.", 5: "4", 7: "It is 42: 12+30="}
    assert [gives_away(hint, PROBLEM) for hint in found.values()] == [True, False, True]


def test_an_answer_is_a_word_that_the_prompt_lacks():
    assert gives_away("= 42", PROBLEM) and not gives_away("142, 420", PROBLEM) and not gives_away("4 2", PROBLEM)
    assert not gives_away("30", Problem("12+30=", "30", 0)) and not gives_away("anything", Problem("?", "", 0))
    assert gives_away("x^2 (a)", Problem(({"role": "user", "content": "?"},), "x^2", 0))
