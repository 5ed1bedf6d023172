"""XRPO's solved problems as examples: who sees them, which ones, cut to the room there is, and kept over batches."""
import dataclasses

import numpy as np
from test_hint_replaced import encode
from test_topologies import follow

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.topologies import make_rule, rounds
from jaxrl_llm.topologies.base import remember as restore
from jaxrl_llm.topologies.base import remembered
from jaxrl_llm.topologies.rounds import by_rule
from jaxrl_llm.topologies.solved_examples import EXAMPLE, TEMPLATE, seeded, solved_examples, unrewarded

SOLVED = [{"prompt": "1+2=", "solution": "3"}, {"prompt": "apples? ", "solution": "none"}]


def test_prompts_without_reward_see_solved_problems_in_their_further_rollouts():
    """Prompt 0 has reward at once, 1 with the examples alone, 2 never; the corpus then has the problems of this batch."""
    def reward(problem, number):
        return float(problem == 0 or (problem == 1 and number == 3))

    inner = rounds(3, group=2, most=4, wants=lambda forest: np.full(3, 2))
    topology = solved_examples(inner, group=2, encode=encode)
    topology.memory["solved"][:] = SOLVED
    plans, forest = follow(topology, reward)
    assert [[(act.at, act.count, bytes(act.reads)) for act in plan.acts] for plan in plans[1:]] == [
        [(0, 2, b""), (1, 2, b""), (2, 2, b"")],
        [(0, 2, b""), (1, 2, b"apples? none\n\n1+2=3\n\nq"), (2, 2, b"apples? none\n\n1+2=3\n\nq")]]
    assert unrewarded(forest, 4).tolist() == [False, False, True]
    assert topology.metrics(topology.finish(forest)) == {
        "examples/prompts": 2 / 3, "examples/solved": 0.5, "examples/corpus": 3}
    assert topology.memory["solved"][2] == {"prompt": "q", "solution": ""} and topology.reads == 512
    again = solved_examples(inner, group=2, encode=encode)
    restore(again, remembered(topology))
    assert again.memory == topology.memory


def test_without_a_solved_problem_rollouts_read_the_prompt():
    topology = solved_examples(by_rule(3, group=2, most=4, rule=make_rule("xrpo_allocation")), group=2, encode=encode)
    plans, forest = follow(topology, lambda problem, number: 0.0)
    assert not any(len(act.reads) for plan in plans for act in plan.acts)
    assert not (topology.finish(forest).role == Role.ELSEWHERE).any() and topology.memory == {"solved": []}


def test_examples_are_cut_to_the_room_there_is():
    problem = Problem("5+6=", "11", 0)
    near = [{"prompt": "3+4=", "solution": "7, since 3 and 4"}, {"prompt": "2+2=", "solution": "4"}]
    found = [bytes(seeded(problem, near, EXAMPLE, TEMPLATE, encode, most)).decode() for most in (99, 32, 26, 12, 10, 3)]
    assert found == ["2+2=4\n\n3+4=7, since 3 and 4\n\n5+6=", "3+4=7, since 3 and 4\n\n5+6=", "3+4=7, since 3 and 4\n\n5+6=",
                     "3+4=7,\n\n5+6=", "", ""]
    assert seeded(dataclasses.replace(problem, prompt="7"), [], EXAMPLE, TEMPLATE, encode, 9) == []
