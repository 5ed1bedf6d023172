"""An environment's facts of turns, as extras of trajectories: every join, on trajectories written by hand."""
import numpy as np
import pytest

from jaxrl_llm.data import turn_info
from jaxrl_llm.data.forest import grow, paths, plant
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments import Environment
from jaxrl_llm.tasks.base import Problem, seeded

JOINS = {"calls": "count", "broken": "any", "game": "once", "agent": "turn", "void": "tokens", "marks": "score",
         "eos": "last", "gains": "list", "items": "spans"}


def facts(calls, broken, agent, void, marks, eos=True, gains=(), items=()):
    return {"calls": calls, "broken": broken, "game": 4, "agent": agent, "void": void, "marks": marks, "eos": eos,
            "gains": list(gains) or [0, 0], "items": list(items)}


def grown(nodes, returns=None):
    """One prompt of two tokens; `nodes` are (uid, parent, role, tokens, info)."""
    uid, parent, role, length, info = zip(*nodes)
    if returns is not None:
        info = [*info[:-1], {**info[-1], "returns": returns}]
    zeros, count = np.zeros(sum(length)), len(nodes)
    forest = plant([Problem("?", "", 0)], [[1, 2]], ["success"], answers=False, turns=True)
    return grow(forest, np.array(parent), np.array(uid), dict(role=np.array(role), length=np.array(length),
                stopped=np.ones(count, bool), rewards=np.arange(count), components=np.zeros((count, 1)), texts=[""] * count,
                answers=None, tokens=zeros, logprobs=zeros, entropies=zeros, version=zeros, turn_rewards=np.zeros(count),
                turn_info=list(info), prompt=np.zeros(count, int)))


NODES = [(7, 0, Role.POLICY, 2, facts(1, False, 0, False, 0.5, False, items=[0, -1])), (7, 1, Role.ENVIRONMENT, 1, {}),
         (7, 2, Role.POLICY, 1, facts(2, True, 1, True, -0.5, gains=[1, 0.5], items=[3])),
         (8, 0, Role.POLICY, 3, facts(0, False, 1, False, 0.25, items=[1, 1, 2]))]


def view(forest, turns=3):
    return paths(forest, turns, JOINS, group=2, prompts=1, version=0, tokens=lambda n: 5, prompt_tokens=lambda n: 2)


def test_every_join():
    extras = view(grown(NODES)).extras
    assert set(JOINS.values()) == set(turn_info.JOINS)
    assert extras["calls"].tolist() == [[3, 0]] and extras["calls"].dtype == np.int32
    assert extras["broken"].tolist() == [[True, False]] and extras["game"].tolist() == [[4, 4]]
    assert extras["agent"].tolist() == [[[0, 1, -1], [1, -1, -1]]]
    assert extras["void"].tolist() == [[[False, False, False, True, False], [False] * 5]]
    assert extras["marks"].tolist() == [[[0, 0.5, 0, -0.5, 0], [0, 0, 0.25, 0, 0]]]
    assert extras["eos"].tolist() == [[[False, False, False, True, False], [False, False, True, False, False]]]
    assert extras["gains"].tolist() == [[[1, 0.5], [0, 0]]] and extras["gains"].dtype == np.float32
    assert extras["items"][0, 0, :4].tolist() == [0, -1, -1, 3] and extras["items"][0, 1, :3].tolist() == [1, 1, 2]
    assert extras["agent_returns"].tolist() == [[[2, 2, 0], [3, 0, 0]]]  # without returns that of the trajectory
    assert extras["settled"].tolist() == [[False, False]] and extras["settled"].dtype == bool


def test_agents_get_returns_of_their_own():
    moved = [(uid, parent + (parent > 0), *rest) for uid, parent, *rest in NODES[:3]]
    extras = view(grown([NODES[3], *moved], returns=[-1.0, 1.0])).extras  # the first trajectory was cut, the second one ended
    assert extras["agent_returns"].tolist() == [[[0, 0, 0], [-1, 1, 0]]] and extras["settled"].tolist() == [[False, True]]


def test_a_turn_without_tokens_has_nowhere_to_be_marked():
    nodes = [NODES[0], NODES[1], (*NODES[2][:3], 0, NODES[2][4])]
    extras = view(grown(nodes)).extras
    assert extras["marks"].tolist() == [[[0, 0.5, 0, 0, 0], [0] * 5]] and not extras["void"].any()
    assert extras["calls"].tolist() == [[3, 0]]


def test_facts_that_do_not_hold_what_they_say():
    with pytest.raises(ValueError, match="declares the fact 'void'"):
        turn_info.check({"void": "tokens"}, {"calls": 1})
    with pytest.raises(ValueError, match="void='no'"):
        turn_info.check({"void": "tokens"}, {"void": "no"})
    made = {"name": "x", "task": seeded("x", "?", 2, 1), "reset": None, "step": None}
    with pytest.raises(ValueError, match="Did you mean 'tokens'"):
        Environment(**made, facts={"void": "token"})
    with pytest.raises(ValueError, match="belongs to a turn"):
        Environment(**made, facts={"agent": "count"})
