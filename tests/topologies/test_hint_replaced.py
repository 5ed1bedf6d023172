"""KEPO's hinted completions in the places of rollouts: who gets hints, how often, and which rollouts they replace."""
import dataclasses

import jax
import numpy as np
import pytest
from played import play
from test_topologies import asked, follow

from jaxrl_llm.control.kepo import replaced
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.topologies import single
from jaxrl_llm.topologies.hint_replaced import hint_of, hint_replaced
from jaxrl_llm.topologies.wording import elsewhere, fitting, longer, nearest, remember, template_of, worded, words_of


def encode(problem):
    return list(words_of(problem).encode())


def hinted(prompts=3, group=4, **numbers):
    return hint_replaced(single(prompts, group=group), group=group, **numbers)


def test_prompts_without_reward_get_hints_until_all_completions_of_an_attempt_are_right():
    """Prompt 0 is solved without, 1 at the second attempt (one of two right at the first), 2 never."""
    def reward(problem, number):
        return float(number % 2 if problem == 0 else number in (5, 6, 7) if problem == 1 else 0)

    topology = hinted(attempts=3)
    plans, forest = follow(topology, reward)
    assert asked(plans) == [3, {0: 4, 1: 4, 2: 4}, {1: 2, 2: 2}, {1: 2, 2: 2}, {2: 2}]
    hints = [act for plan in plans[2:] for act in plan.acts]
    assert {act.reads.prompt for act in hints} == {"A hint, which the answer does not mention: \nq"}
    assert topology.reads(Problem("q", "7", 3)).prompt == "A hint, which the answer does not mention: 7\nq"
    done = topology.finish(forest)
    assert np.bincount(done.prompt[done.ends]).tolist() == [4, 4, 4]
    moved = done.prompt[done.ends[elsewhere(done)]]
    place = np.asarray(replaced(jax.random.key(int(forest.uid[forest.ends[4]])), np.ones(1, bool), 4))[0]
    assert 1 <= len(moved) == place.sum() <= 2 and set(moved.tolist()) == {1}
    rewards = done.rewards[done.ends]
    assert rewards[:4].tolist() == [0, 1, 0, 1] and rewards[4:8].sum() == len(moved) and not rewards[8:].any()
    assert done.uid[done.ends[4:8]][-len(moved):].tolist() == forest.uid[forest.ends][forest.rewards[forest.ends] == 1][
        -len(moved):].tolist()
    assert topology.metrics(done) == {"hint/prompts": pytest.approx(2 / 3), "hint/solved": 0.5, "hint/answer": 0}


def test_without_adaptation_all_prompts_get_hints():
    topology = hinted(adaptive=False, draws=3)
    plans, forest = follow(topology)
    assert asked(plans) == [3, {0: 4, 1: 4, 2: 4}, {0: 3, 1: 3, 2: 3}]
    done = topology.finish(forest)
    assert len(done.ends) == 12 and set(done.prompt[done.ends[elsewhere(done)]].tolist()) == {0, 1, 2}
    solved = hinted()
    assert solved.metrics(solved.finish(follow(solved)[1])) == {"hint/prompts": 0}


def test_a_hint_contains_the_answer_as_a_word():
    topology = hinted(2, 2)
    problems = [Problem("1+6=", "7", 0, extra={"hint": hint}) for hint in ("It is 7.", "It is below 17.")]
    forest = topology.finish(play(topology, problems, lambda problem, act, number: 0.0)[1])
    assert topology.metrics(forest) == {"hint/prompts": 1, "hint/solved": 0, "hint/answer": 0.5}


def test_hints_without_room_are_attempts_that_failed():
    plans, forest = follow(hinted(1, attempts=2), lambda problem, number: 0.0, loses=lambda problem, number: number >= 4)
    assert asked(plans) == [1, {0: 4}, {0: 2}, {0: 2}] and forest.lost.tolist() == [4]
    assert hinted().finish(forest).rewards[forest.ends].tolist() == [0] * 4


def test_one_topology_says_how_long_other_words_are():
    assert [longer(0, 3), longer(2, 0), longer(2, 3), longer(words_of, 0)] == [3, 2, 3, words_of]
    with pytest.raises(ValueError, match="two topologies let the policy read other words"):
        longer(words_of, 3)


def test_hints_are_fields_of_problems_or_their_traces():
    problem = Problem("3+4=", "7", 5, extra={"hint": "four more"})
    assert hint_of(problem) == "four more" and hint_of(dataclasses.replace(problem, extra={})) == "7"
    said = ({"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"})
    assert hint_of(dataclasses.replace(problem, extra={"traces": [{"messages": said}]})) == "a\nb"
    assert hint_of(dataclasses.replace(problem, extra={"hint": ""})) is None
    wrong = {"text": "It is 8.", "correct": False}
    assert hint_of(dataclasses.replace(problem, extra={"traces": [wrong, {"text": "It is 7."}]})) == "It is 7."


@pytest.mark.parametrize("traces", ([], [{"text": "It is 8.", "correct": False}]))
def test_problems_without_a_right_trace_keep_their_rollouts(traces):
    problem, topology = Problem("3+4=", "7", 5, extra={"traces": traces}), hinted(1, 2)
    plans, forest = play(topology, [problem], lambda problem, act, number: 0.0)
    assert len(plans) == 2 and topology.reads(problem) is None
    done = topology.finish(forest)
    assert done.uid[done.ends].tolist() == [0, 1] and topology.metrics(done) == {"hint/prompts": 0}


def test_problems_in_other_words(tmp_path):
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "3+4={}"}, {"role": "assistant", "content": "It"})
    problem = Problem(chat, "7", 5, extra={"topic": "sums"})
    (tmp_path / "own.txt").write_text("{topic} {{x}}: {hint}, {prompt}")
    template = template_of(f"{tmp_path}/own.txt", "hint")
    assert worded(problem, template, hint="{4}").prompt == (
        chat[0], {"role": "user", "content": "sums {x}: {4}, 3+4={}"}, chat[2])
    text = worded(Problem("3+4=", "7", 5), "{answer} {prompt}")
    assert text.prompt == "7 3+4=" and fitting(ByteTokenizer().encode, "ab", 1) == [] and len(encode(text)) == 6
    for wrong, said in (("{prompt}", "has the fields .'prompt'., without 'hint'; write .hint. where"),
                        ("{", "braces of the words"), ("no.txt", "template='no.txt' is no file")):
        with pytest.raises(ValueError, match=said):
            template_of(wrong, "hint")
    with pytest.raises(ValueError, match="problem 5 has no field 'hnt', which a template has; it has answer, prompt, topic"):
        worded(problem, "{hnt}")


def test_the_nearest_documents_by_their_words():
    """Two documents of four words: idf of a word in one of them is log 2, and f = 1 counts once; of no word nothing."""
    documents = ["red apples and pears", "ten green apples fall", "a", "Pears? red pears!"]
    assert nearest("Red pears", documents, 2) == [3, 0] and nearest("none", documents, 3) == [0, 1, 2]
    assert nearest("x", [], 2) == []


def test_examples_that_are_kept():
    kept = [{"prompt": "a", "text": "1"}, {"prompt": "b", "text": "2"}]
    remember(kept, {"prompt": "a", "text": "3"}, 2)
    assert [one["text"] for one in kept] == ["2", "3"]
    remember(kept, {"prompt": "c", "text": "4"}, 2)
    assert [one["text"] for one in kept] == ["3", "4"]
