"""The slot engine on the replicas of a mesh: the tokens of one device, even work, and no more traffic than a layer needs."""
import types

import jax
import job
import pytest
import slots_cases

from jaxrl_llm.engines.lanes import common_places, places_of
from jaxrl_llm.engines.requests import Request, Row
from jaxrl_llm.engines.shards import Places, Shards
from jaxrl_llm.engines.stopping import StopSearch


def row(tokens, slot=None, finish=None):
    search = StopSearch((), (), None, ())
    return Row(Request(0, 4, tokens), list(tokens), search, slot=slot, finish=finish, begun=(0, len(tokens)))


def dealt(slots, waiting, shards=2, rows=4, known=(), homes=None):
    places = Places(Shards(jax.devices()[0], types.SimpleNamespace(), shards, rows), slots, len(waiting), known)
    return [places.choose(one, None if homes is None else homes[i]) for i, one in enumerate(waiting) if places.left]


def test_rows_of_a_prompt_go_to_one_shard_while_shards_are_even():
    a, b, c = ([n, n, n] for n in (1, 2, 3))
    assert dealt([None] * 8, [row(a)] * 4 + [row(b)] * 4) == [0] * 4 + [1] * 4
    assert dealt([None] * 8, [row(a)] * 2 + [row(b)] * 2 + [row(c)] * 2) == [0, 0, 1, 1, 0, 1]
    assert dealt([None] * 8, [row(a)] * 6) == [0, 0, 0, 1, 1, 1]  # a prompt of all is read in each
    assert dealt([None] * 8, [row(b)] * 2, known=[(1, (2, 2))]) == [1, 0]
    busy = [row(c, slot) for slot in range(3)] + [None, row(c, 4, "stop"), None, None, None]
    assert dealt(busy, [row(a)] * 8) == [1, 1, 1, 1, 0]  # slots of rows that have ended are free, and three rows wait
    assert dealt(busy, [row(a)] * 3, homes=[0, 0, None]) == [0, None, 1]


def test_lanes_and_what_they_share_lie_within_shards():
    slots = [row([1], 0), None, None, row([2], 3), None, row([3], 5), None, None]
    assert places_of(slots, 2, shards=2) == [0, 3, 4, 5] and places_of(slots, 3, shards=2) == [0, 1, 3, 4, 5, 6]
    alike = [row([7] * 200, slot) for slot in range(6)]
    assert common_places(alike) == (192, (0,)) and common_places(alike, shards=2) == (192, (0, 3))
    assert common_places(alike, shards=3) == (192, (0, 2, 4)) and common_places(alike, shards=6) == (0, ())


@pytest.fixture(scope="module")
def result():
    return job.result_of("slots_cases.py", 8)


@pytest.mark.slow
@pytest.mark.parametrize("case", [" ".join(map(str, case)) for case in slots_cases.CASES])
def test_tokens_are_those_of_one_device(result, case):
    """Of groups, turns, forks, beginnings, limits, new weights, rows that wait for a slot and those that lost one."""
    found = result[case]
    near = 1e-3 if case.startswith("int8") else 1e-5  # where rounding differs, so may a whole step of eight bits
    assert found["equal"] and found["apart"] < near and found["left"] == 2
    assert max(found["drawn"]) <= 1.2 * min(found["drawn"]) and sum(found["drawn"]) == 128


@pytest.mark.slow
@pytest.mark.parametrize("case", ("tools (1, 2, 2, 2)", "game (2, 2, 2)", "turns (1, 2, 2)",
                                  "replay (4, 1, 1)", "controllers (1, 1, 4)", "routes (2, 1, 2)"))
def test_runs_learn_what_they_learn_on_one_device(case):
    """Three Adam steps with tools, in a game, of single turns, with a replay, with controllers, of replayed routes."""
    found = job.result_of("agent_cases.py", 8)[case]
    assert found["same"] == [True] * 3 and found["first"] < 1e-5 and found["gradient"] < 1e-5 and found["weights"] < 2e-4


@pytest.mark.slow
def test_a_replica_sends_what_a_dense_layer_needs(result):
    """Two sums of states in each layer and one of the embedding; the draw exchanges the vocabulary for rows."""
    kinds = [kind for kind, _, _ in result["sent"]]
    assert {group for _, group, _ in result["sent"]} == {4}
    assert sorted(size for kind, _, size in result["sent"] if kind == "all-reduce") == [4 * 32 * 8] * 5
    assert kinds.count("all-to-all") == 1 and {*kinds} == {"all-reduce", "all-to-all", "all-gather"}
    gathered = [size for kind, _, size in result["sent"] if kind == "all-gather"]
    assert sorted(gathered)[:3] == [4 * 8] * 3 and sorted(gathered)[3:] in ([], [4 * 8 * 256])  # draws, a block of sums
