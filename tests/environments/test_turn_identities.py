"""States and actions that environments give beside their texts: what is compared, and where they are carried."""
import contextlib

import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, environments
from jaxrl_llm.advantages.turns import of_turns
from jaxrl_llm.data.forest import graft, grow, join, paths, plant, select
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.environments import base, tools
from jaxrl_llm.environments.runner import Recording, Runner
from jaxrl_llm.environments.tools import Call
from jaxrl_llm.setup import setup
from jaxrl_llm.tasks.base import Problem

SAME = {"tokens": lambda longest: longest, "prompt_tokens": lambda longest: longest, "version": 0, "group": 2, "prompts": 1}
# The example of SALT: both trajectories do a5 in the state 0, then a6 or a8 in the state 1, and a7 in the state 2 or 3.
SAID = [["I see two doors. go north", "take key", "open chest"], ["GO NORTH, I think", "go east", "So: open chest"]]
READ = [["You are in the crypt.", "Taken. You are in the crypt."], ["Fine. You are in the crypt.", "You are in the vault."]]
STATES, ACTIONS = [[0, 1, 2], [0, 1, 3]], [["a5", "a6", "a7"], ["a5", "a8", "a7"]]


def forest_of(infos):
    """Two trajectories of three turns of one token, with answers of one token; rewards 2 and 0.5."""
    forest = plant([Problem("?", "", 0)], [[1]], ["success"], answers=False, turns=True)
    for uid, (said, read) in enumerate(zip(SAID, READ)):
        texts = [said[0], read[0], said[1], read[1], said[2]]
        first, reward = len(forest.uid), [0, 0, 0, 0, [2, 0.5][uid]]
        forest = grow(
            forest, [0, *range(first, first + 4)], [uid] * 5, dict(role=[Role.POLICY, Role.ENVIRONMENT] * 2 + [Role.POLICY],
            length=[1] * 5, stopped=[True] * 5, rewards=reward, components=np.zeros((5, 1)), texts=texts, answers=None,
            tokens=[2] * 5, logprobs=np.zeros(5), entropies=np.zeros(5), version=np.zeros(5), turn_rewards=reward,
            turn_info=[infos[uid][0], {}, infos[uid][1], {}, infos[uid][2]], prompt=[0] * 5))
    return forest


def given(*names):
    values = {"state": STATES, "action": ACTIONS}
    return [[{name: values[name][uid][turn] for name in names} for turn in range(3)] for uid in range(2)]


def credited(forest, name, **hyper):
    rollouts = jax.tree.map(jnp.asarray, paths(forest, 3, **SAME))
    estimator = of_turns(advantages.make(name, **hyper))
    result, _ = estimator.update(rollouts, estimator.init())
    return np.asarray(result)[0, :, ::2]


def numbers(forest):
    extras = paths(forest, 3, **SAME).extras
    return tuple(extras[name][0].tolist() for name in ("obs", "act", "next_obs"))


def test_worked_example_of_two_phrasings_of_one_action():
    forest = forest_of(given("state", "action"))
    assert numbers(forest) == ([[0, 1, 2], [0, 1, 3]], [[0, 1, 2], [0, 3, 2]], [[0, 1, 2], [0, 3, 4]])
    np.testing.assert_allclose(credited(forest, "salt", base="rloo"), [[0, 1.5, 1.5], [0, -1.5, -1.5]], atol=1e-6)
    step = credited(forest, "gigpo", gamma=1.0) - [[0.75], [-0.75]]  # without the part of the whole trajectory
    np.testing.assert_allclose(step, [[0.75, 0.75, 0], [-0.75, -0.75, 0]], atol=1e-6)


def test_texts_are_compared_where_nothing_is_given():
    forest = forest_of([[{}] * 3] * 2)
    assert numbers(forest) == ([[0, 1, 2], [0, 3, 4]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_allclose(credited(forest, "salt", base="rloo"), [[1.5] * 3, [-1.5] * 3])  # SALT is RLOO
    assert numbers(forest_of([[{"state": None, "action": None}] * 3] * 2)) == numbers(forest)


def test_one_of_both_is_enough():
    forest = forest_of(given("action"))
    assert numbers(forest) == ([[0, 1, 2], [0, 3, 4]], [[0, 1, 2], [0, 3, 2]], [[0, 1, 2], [3, 4, 5]])
    infos = given("state", "action")
    infos[1][0] = {}  # the first turn of one trajectory: its texts are equal to no state or action
    assert numbers(forest_of(infos))[:2] == ([[0, 1, 2], [3, 1, 4]], [[0, 1, 2], [3, 4, 2]])
    infos = [[{"state": {"a": 1, "b": [2]}}] * 3, [{"state": {"b": [2], "a": 1}}] * 3]
    assert numbers(forest_of(infos))[0] == [[0] * 3] * 2


def test_forests_that_are_cut_and_joined_keep_them():
    forest = forest_of(given("state", "action"))
    root = plant(forest.problems, [[1]], ["success"], answers=False, turns=True)
    for other in (graft(root, forest, [0]), select(join([forest, forest]), np.array([False, True]))):
        assert numbers(other) == numbers(forest)


def play(name, problem=0, options=None, *texts):
    environment = environments.make(name, **(options or {}))
    state, _ = base.begin(environment, environment.task.train[problem], 0)
    return [base.advance(environment, state, {"role": "assistant", "content": text}) for text in texts], state


def known(turns):
    return [(turn.info.get("state"), turn.info.get("action")) for turn in turns]


def test_treasure_knows_rooms_and_commands():
    """An opening, an impossible command and a way back: one state, though all three texts differ."""
    environment = environments.make("treasure", size=2)
    state, _ = base.begin(environment, environment.task.train[0], 0)
    here, way = state.here, sorted(state.doors[state.here])[0]
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[way]
    wall = next(name for name in ("north", "east", "south", "west") if name not in state.doors[here])
    said = [f"go {wall}", f"I try go {way.upper()}", f"now go {back}", "hm", f"go {way}"]
    turns = [base.advance(environment, state, {"role": "assistant", "content": text}) for text in said]
    assert [action for _, action in known(turns)] == [f"go {wall}", f"go {way}", f"go {back}", "", f"go {way}"]
    start = [*here, False]
    assert [known(turns)[turn][0] for turn in (0, 1, 3, 4)] == [start] * 4 and known(turns)[2][0] != start
    assert len({turns[turn].messages[0]["content"] for turn in (0, 2, 3)}) == 3
    state.here = state.key
    (taken, opened) = [base.advance(environment, state, {"role": "assistant", "content": text}) for text in
                       ("take key", "open chest")]
    assert (taken.info["state"][2], taken.info["action"], opened.info["state"][2]) == (False, "take key", True)


def test_games_know_positions_and_moves():
    turns, _ = play("guess_number", 0, {"highest": 20}, "it is 0", "what?")
    assert known(turns) == [([1, 20, 5], 0), ([1, 20, 4], "")]
    environment = environments.make("tic_tac_toe")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    board = state.board
    (turn,) = [base.advance(environment, state, {"role": "assistant", "content": "no"})]
    assert known([turn]) == [(board, "")]


def test_calls_are_compared_by_name_and_arguments():
    assert tools.identity([Call("f", {"a": " x", "b": 3.0})]) == tools.identity([Call("f", {"b": 3, "a": "x\n"})])
    different = [[Call("f", {})], [Call("g", {})], [Call("f", {"a": 1})], [Call("f", {"a": True})], [Call("f", {"a": "1"})],
                 [Call("f", {}, "broken")], [Call("f", {})] * 2, [Call("f", {"a": 0.5})]]
    assert len({tools.identity(calls) for calls in different}) == len(different)
    deep = []
    for _ in range(2000):  # deeper than any Python's stack
        deep = [deep]
    assert tools.identity([Call("f", {"a": deep})]) is None
    many = [Call("f", {"n": n}) for n in range(5)]
    assert tools.identity(many) == tools.identity([*many[:4], Call("g", {})])  # it has no result either


@pytest.mark.parametrize("parser, first, second", [
    ("hermes", 'Hm. <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>',
     '<think>?</think><tool_call>{"arguments": {"expression": "2*3 "}, "name": "calculator"}</tool_call>'),
    ("llama3", '{"name": "calculator", "parameters": {"expression": "2*3"}}',
     '<|python_tag|>{"parameters":{"expression":"2*3"},"name":"calculator"}'),
    ("pythonic", '[calculator(expression="2*3")]', "calculator(expression='2*3')")])
def test_tool_use_knows_calls_and_answers(parser, first, second):
    options = {"parser": parser, "reward": "last_number"}
    (one, answered), _ = play("tool_use", 3, options, first, "It is 6.")
    (other, again), _ = play("tool_use", 3, options, second, "So 6.0")
    (silent,), _ = play("tool_use", 3, options, "I do not know.")
    assert one.info["action"] == other.info["action"] != answered.info["action"]
    assert answered.info["action"] == again.info["action"] == "answer 6" and silent.info["action"] is None
    assert "state" not in one.info  # results of tools are texts without phrasings
    (called,), _ = play("faulty_environments:drawers", 0, None, '<tool_call>{"name": "open_drawer"}</tool_call>')
    assert '"open_drawer"' in called.info["action"]


def test_games_of_arrays_know_positions_and_moves():
    target = "counting_game:counting"
    turns, _ = play(target, 0, None, "none of it", "one, I say", "ONE")
    start = int(turns[0].info["state"])
    assert known(turns) == [(f"{start}", ""), (f"{start}", "one"), (f"{start + 1}", "one")]
    compiled = Runner(target, seed=0, kind="compiled")
    problem = compiled.environment.task.train[0]
    compiled.reset({uid: problem for uid in range(3)})
    words = ["none of it", "one, I say", "ONE"]
    batch = [compiled.step({uid: {"role": "assistant", "content": words[turn]} for uid in range(3)}) for turn in range(3)]
    assert all(known([turns_of[uid] for turns_of in batch]) == known(turns) for uid in range(3))


def test_gymnasium_knows_observations_of_numbers():
    pytest.importorskip("gymnasium")
    options = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "options": {"is_slippery": False}}
    turns, _ = play("gymnasium_text", 0, options, "down", "I go up.", "right", "hm")
    assert known(turns) == [(0, "down"), (4, "up"), (0, "right"), (1, "")]


def test_textarena_knows_positions_and_moves_in_brackets():
    """Right and back left is the first square again; a step into the wall leaves it; two phrasings are one move."""
    pytest.importorskip("textarena")
    game = {"game": "FrozenLake-v0"}
    turns, _ = play("textarena_game", 0, game, "I go [right].", "so [left]", "[right]", "well, [right]")
    states, actions = zip(*known(turns))
    assert states[0] == states[2] != states[1] == states[3]
    assert actions == (["[right]"], ["[left]"], ["[right]"], ["[right]"])
    (silent,), _ = play("textarena_game", 0, game, "hm")
    assert known([silent]) == [(states[0], [])]
    assert play("textarena_game", 1, game, "hm")[0][0].info["state"] != states[0]
    both, _ = play("textarena_game", 0, {"game": "TicTacToe-v0"}, "[4]", "[0]", "[3]")
    assert len({turn.info["state"] for turn in both}) == 3 and "action" not in both[0].info  # the other player reads the text


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_runners_carry_them(kind):
    """Through workers, in replays, and in trajectories that continue from their recordings."""
    said = [{"role": "assistant", "content": text} for text in ("go north", "hm", "please go east", "go west")]
    with contextlib.closing(Runner("treasure", {"size": 3}, seed=0, kind=kind, workers=1)) as runner, \
            contextlib.closing(Runner("treasure", {"size": 3}, seed=0, kind=kind, workers=1)) as second:
        problem = runner.environment.task.train[0]
        runner.reset({5: problem})
        turns = [runner.step({5: message})[5] for message in said]
        assert [action for _, action in known(turns)] == ["go north", "", "go east", "go west"]
        assert all(len(state) == 3 for state, _ in known(turns)) and runner.replay(5)[1:] == turns
        key = runner.recording(5).key
        assert known(second.resume({5: Recording(problem, key, said[:3])}).values()) == known(turns[2:3])
        assert second.step({5: said[3]})[5] == turns[3]


@pytest.mark.slow
def test_trajectories_of_a_run_carry_them():
    run, params = setup.build(chatter.get_config(environment="treasure(size=2, brief=True)", method="salt", **{
        "sampling.max_tokens": 320, "sampling.turn_tokens": 12, "sampling.max_turns": 8, "prompts.max_tokens": 64}))
    problems = [run.source.task.train[i] for i in range(6)]
    forest = run.source.stream.partner.demonstrated(problems, 0.5)
    mine = (forest.role == Role.EXPERT) | (forest.role == Role.HINT)
    assert mine.sum() > 12 and all(info["action"] == text for info, text in zip(forest.turn_info[mine], forest.texts[mine]))
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))  # an untrained policy names no command
    extras, forest = finished.rollouts.extras, finished.forest
    infos = forest.turn_info[forest.role == Role.POLICY]
    assert len(set(forest.texts[forest.role == Role.POLICY])) > 20 and {info["action"] for info in infos} == {""}
    there = extras["step"] >= 0
    assert not extras["act"][there].any() and not extras["obs"][there].any()  # it never left its first room
