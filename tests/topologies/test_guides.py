"""The share of a trace that completions begin with: the worked examples of ADHint, plans on forests, and refusals."""
import numpy as np
import pytest
from test_topologies import asked, follow

from jaxrl_llm.control.hint_share import hint_ratio
from jaxrl_llm.data.columns import Column
from jaxrl_llm.data.forest import plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.prompts import Spelled, spelled
from jaxrl_llm.engines.requests import Node
from jaxrl_llm.sampling.one_turn import by_author
from jaxrl_llm.sampling.trajectory import Planted, Trajectory, authors, beginning, ended_before, names, spoken
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tasks.traces import Trace, traces_of, useful
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.topologies import TOPOLOGIES, adhint, budgets, experts, make, refill, rounds, single
from jaxrl_llm.topologies.adhint import shares as hints


def test_shares_of_the_worked_examples():
    """Difficulty .75: .6 of the solution with a range of .8; .695 with .9 and a noise of .02."""
    first, valid = np.float32([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]), np.ones((3, 4), bool)
    result = hints(first, valid, np.zeros(len(first), np.float32), low=0.0, high=0.8, noise=0.0)
    np.testing.assert_allclose(result, [0.6, 0.0, 0.8], atol=1e-6)
    ratio = hint_ratio(np.float32([[0, 0, 0, 1]]), np.ones((1, 4), bool), np.float32([0.02]), high=0.9)
    np.testing.assert_allclose(ratio, [0.695], atol=1e-6)


def test_hints_stay_in_their_range_and_grow_with_difficulty():
    rng = np.random.default_rng(1)
    rewards, valid = (rng.random((400, 8)) < rng.random((400, 1))).astype(np.float32), rng.random((400, 8)) < 0.9
    valid[:, 0] = True
    normal, numbers = rng.standard_normal(400).astype(np.float32), {"low": 0.1, "high": 0.7, "noise": 0.05}
    result = hints(rewards, valid, normal, **numbers)
    assert result.min() >= np.float32(0.1) and result.max() <= np.float32(0.7)
    rate = (rewards * valid).sum(1) / valid.sum(1)
    assert (result[rate == 1] == np.float32(0.1)).all() and np.corrcoef(result, rate)[0, 1] < -0.9
    alone = hints(rewards[:7], valid[:7], normal[:7], **numbers)
    np.testing.assert_array_equal(result[:7], alone)  # as in company


def shares(plan):
    """The share that each trajectory of a plan begins with, by prompt."""
    found = {}
    for act in plan.acts:
        assert all(part.role == Role.EXPERT and part.logprobs is None for part in act.parts) and len(act.parts) < 2
        found.setdefault(act.at, []).extend([sum(part.what.share for part in act.parts)] * act.count)
    return found


def test_an_expert_takes_the_first_places_of_each_group():
    topology = experts(single(3, group=4), group=4, traces=2, share=0.5)
    plans, forest = follow(topology)
    assert asked(plans) == [3, {0: 4, 1: 4, 2: 4}] and topology.most == 4
    assert shares(plans[1]) == dict.fromkeys(range(3), [0.5, 0.5, 0, 0])


def test_each_expert_shows_another_trace_of_those_that_may_be_right():
    """Of three traces the second is known to be wrong; the fourth place of an expert shows the first again."""
    extra = {"traces": [{"text": "a", "writer": "x"}, {"text": "b", "correct": False}, {"text": "c", "logprobs": [-1.0, -2.0]}]}
    problem = Problem("q", "", 0, extra=extra)
    assert traces_of(problem) == (Trace("a", "x"), Trace("b", "", False), Trace("c", "", None, [-1.0, -2.0]))
    assert useful(problem) == [0, 2] and useful(problem, wrong=True) == [0, 1, 2]
    forest = plant([problem], [[1]], ("exact",), answers=False)
    for numbers, wanted in (({"traces": 3}, [0, 2, 0]), ({"traces": 3, "wrong": True}, [0, 1, 2])):
        plan = experts(single(1, group=4), group=4, **numbers).plan(forest)
        assert [[part.what.number for part in act.parts] for act in plan.acts] == [[n] for n in wanted] + [[]]
    none = plant([Problem("q", "", 0, extra={"traces": [{"text": "b", "correct": False}]})], [[1]], ("exact",), answers=False)
    assert [(act.count, act.parts) for act in experts(single(1, group=4), group=4).plan(none).acts] == [(4, ())]
    assert traces_of(Problem("q", "7", 0)) == (Trace("7", correct=True),)
    assert traces_of(Problem("q", "7", 0, extra={"solution": "s"})) == (Trace("s", correct=True),)


@pytest.mark.parametrize(("trace", "said"), (
    ({"text": "a", "author": "x"}, r"problem 0: traces\[0\] has the key 'author'; give text, messages, writer, correct"),
    ({"writer": "x"}, r"problem 0: traces\[0\] has no words; give it a 'text', or 'messages'"),
    ({"text": "ab", "logprobs": [-1.0]}, r"problem 0: a trace has 1 log-probs, and 3 tokens with its end token")))
def test_traces_that_cannot_be_read_are_refused(trace, said):
    problem = Problem("q", "", 0, extra={"traces": [trace]})
    with pytest.raises(ValueError, match=said):
        spelled(traces_of(problem)[0], problem, ByteTokenizer())


def test_a_trace_behind_messages_is_the_assistants_message_with_the_templates_own_end():
    """The template ends turns with the byte 35, #, behind which it writes a line that the policy never samples."""
    template = ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}#\n{% endfor %}"
                "{% if add_generation_prompt %}a:{% endif %}")
    tokenizer = ByteTokenizer(template)
    tokenizer.stop_ids = (35,)
    problem = Problem(({"role": "user", "content": "hi"},), "7", 0, extra={"traces": [{"text": "yo"}, {"messages": [
        {"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}, {"role": "assistant", "content": "z"}]}]})
    one, several = (spelled(trace, problem, tokenizer) for trace in traces_of(problem))
    assert bytes(one.ids) == b"yo#" and one.said == [True] * 3
    assert bytes(several.ids) == b"x#\nt:y#\na:z#" and several.said == [True] * 2 + [False] * 8 + [True] * 2


def test_what_tools_say_in_a_trace_is_the_environments():
    trace = Spelled([1, 2, 3, 4, 5], [True, True, False, True, True], [-1.0, -2.0, 0.0, -3.0, -4.0])
    assert beginning(trace, 1.0, 5, by="a") == [
        Planted(4, [1, 2], [-1, -2], "a"), Planted(2, [3], [0]), Planted(4, [4, 5], [-3, -4], "a")]
    assert beginning(trace, 1.0, 4) == [] and beginning(trace, 0.75, 9) == beginning(trace, 1.0, 5)[:2]
    assert beginning(trace, 0.5, 9, Role.HINT) == [Planted(3, [1, 2], [-1, -2])]


def test_words_of_two_teachers_are_two_nodes():
    parts = [planted(Role.EXPERT, 1, 2, by="a"), planted(Role.EXPERT, 3, by="b"), planted(Role.EXPERT, 4, by="b")]
    result = by_author([(authors(parts, 6), names(parts, 6))])
    assert result.writer.tolist() == ["a", "b", ""] and result.role.tolist() == [4, 4, 1]
    assert result.length.tolist() == [2, 2, 2]


def test_an_expert_begins_the_first_rollouts_of_rounds_and_budgets():
    """Further rounds are the policy's alone; of a budget, prompts with one rollout have an expert's alone."""
    topology = experts(rounds(2, group=2, most=5, wants=lambda forest: np.array([False, True])), group=2)
    plans, _ = follow(topology)
    assert asked(plans) == [2, {0: 2, 1: 2}, {1: 2}, {1: 1}] and topology.most == 5
    assert [shares(plan) for plan in plans[1:]] == [{0: [1, 0], 1: [1, 0]}, {1: [0, 0]}, {1: [0]}]
    plans, _ = follow(experts(budgets(2, prompts=2, group=4, most=5, utility="per_rollout"), group=4), expected=[0.5, 0.2])
    assert shares(plans[1]) == {0: [1, 0, 0], 1: [1, 0, 0, 0, 0]}


def test_hints_follow_a_group_without_any():
    """Problem 0 is solved, 1 half of the time, 2 never; a second batch with the same rollouts has the same noise."""
    topology = adhint(single(3, group=2), group=2)

    def reward(problem, number):
        return float(number % 2 == 0 if problem == 1 else problem == 0)

    plans, forest = follow(topology, reward)
    assert asked(plans) == [3, {0: 2, 1: 2, 2: 2}, {0: 2, 1: 2, 2: 2}] and topology.most == 4
    assert shares(plans[1]) == dict.fromkeys(range(3), [0, 0])
    first, again = shares(plans[2]), shares(follow(topology, reward)[0][2])
    assert first == again and all(one == two for one, two in first.values())
    easy, half, hard = (first[row][0] for row in range(3))
    assert easy == 0 and 0.2 < half < 0.6 < hard < 0.801 and abs(half - 0.4) > 1e-5
    both = refill(topology, 2, keep=lambda forest: forest.draw > 0, attempts=3)
    assert asked(follow(both, reward)[0]) == [3, *[{p: 2 for p in (0, 1, 2)}] * 2, 3, *[{p: 2 for p in (3, 4, 5)}] * 2]


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="hints from low=0.5 to high=0.4"):
        adhint(single(3, group=2), group=2, low=0.5, high=0.4)
    with pytest.raises(ValueError, match="the topology 'single' wraps no other, and is named as one that does; take"):
        make(None, (), {"prompts": 3, "group": 2}, {}, around=[("single", {})])
    alone, = [one for one in TOPOLOGIES["experts"].conflicts if "config.sampling.group" in one.of]
    assert alone.why(2, 2).startswith("experts begin all of the 2 completions") and not alone.why(1, 2)


def test_nodes_of_completions_by_their_authors():
    """An expert's alone, a prefix, the policy's alone, an empty one, a hint behind tokens that the policy wrote before."""
    parts = [planted(Role.POLICY, 7), planted(Role.POLICY, 8), planted(Role.HINT, 9, 9)]
    begun = [([planted(Role.EXPERT, *[1] * n, by="a")], length) for n, length in ((9, 3), (2, 5), (0, 4), (0, 0))]
    result = by_author([(authors(some, length), names(some, length)) for some, length in [*begun, (parts, 6)]])
    assert result.row.tolist() == [0, 1, 1, 2, 3, 4, 4, 4] and result.role.tolist() == [4, 4, 1, 1, 1, 1, 3, 1]
    assert result.writer.tolist() == ["a", "a", "", "", "", "", "", ""]
    assert result.length.tolist() == [3, 2, 3, 4, 0, 2, 2, 2]
    assert result.first.tolist() == [True, True, False, True, True, True, False, False]
    assert result.last.tolist() == [True, False, True, True, True, False, False, True]


def planted(role, *ids, logprobs=(), by=""):
    return Planted(role, [*ids], [*logprobs] or [np.nan] * len(ids), by)


def test_a_turn_begins_with_what_is_planted():
    """An engine reads three tokens behind a prompt of two and draws one; what they are worth to their writer may be unknown."""
    parts = planted(Role.POLICY, 7, logprobs=[-3]), planted(Role.HINT, 9), planted(Role.EXPERT, 1, 2, logprobs=[-4, -5])
    one = Trajectory([5, 6], 0, planted=[*parts], version=8)
    drawn = Node(3, None, 6, np.int32([4]), np.float32([-1]), np.float32([0.5]), np.int32([9]), "limit",
                 {"more": np.ones((1, 2))})
    turn = spoken(one, drawn, (Column("more", "token", np.float32, (2,), fill=-1),))
    assert (turn.start, turn.tokens.tolist(), turn.policy_version.tolist()) == (2, [7, 9, 1, 2, 4], [8, 8, 8, 8, 9])
    np.testing.assert_array_equal(turn.logprobs, [-3, np.nan, -4, -5, -1])
    np.testing.assert_array_equal(turn.entropies, [np.nan] * 4 + [0.5])
    assert turn.columns["more"].tolist() == [[-1, -1]] * 4 + [[1, 1]]
    one.turns = 1
    assert spoken(one, drawn, ()) is drawn


@pytest.mark.parametrize(("limit", "stops", "tokens", "finish"), [
    (9, (2,), [7, 1, 2], "stop"), (2, (2,), [7, 1], "limit"), (3, (2,), [7, 1, 2], "stop"), (4, (), [7, 1, 2, 3], "limit")])
def test_nothing_is_sampled_behind_a_stop_token_or_the_limit(limit, stops, tokens, finish):
    one = Trajectory([5, 6], 0, planted=[planted(Role.EXPERT, 7, 1, 2, 3)], version=8)
    turn = ended_before(one, 11, limit, stops, ())
    assert (turn.uid, turn.start, turn.tokens.tolist(), turn.finish) == (11, 2, tokens, finish)
    said = ended_before(one, 11, limit, stops, (), 1)
    assert (said.tokens.tolist(), said.finish) == ([7], "stop_string")
    assert ended_before(one, 11, 5, (), ()) is None and ended_before(Trajectory([5], 0), 11, 1, (), ()) is None
