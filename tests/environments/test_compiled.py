"""Games of arrays: batches in one program equal single trajectories bit for bit, and continue from recorded messages."""
import json
import random

import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import base, games
from jaxrl_llm.environments.compiled import opening_of
from jaxrl_llm.environments.runner import Recording, Runner
from jaxrl_llm.environments.shortest import shortest_way
from jaxrl_llm.environments.tic_tac_toe import played, winner
from jaxrl_llm.environments.tic_tac_toe import shown as shown_board
from jaxrl_llm.environments.worker import StepRequest


def say(text):
    return {"role": "assistant", "content": text}


def make(kind="compiled", target="counting_game:counting", **settings):
    return Runner(target, **{"seed": 3, "kind": kind, "limit": 1.0, **settings})


def problems(runner, count):
    return {uid: runner.environment.task.train[uid % 7] for uid in range(count)}


def words_of(environment, turn, chance):
    """A random action, sometimes invalid, in a policy's words."""
    return say(chance.choice([*environment.reset.game.words, *environment.reset.game.words, "I do not know"]))


def play(runner, count):
    """All turns of random trajectories, by uid; messages depend only on the uid."""
    chances = {uid: random.Random(uid) for uid in range(count)}
    turns = runner.reset(problems(runner, count))
    turns_of = {uid: [turn] for uid, turn in turns.items()}
    while going := [uid for uid, all_turns in turns_of.items() if not all_turns[-1].done]:
        turns = runner.step({uid: words_of(runner.environment, turns_of[uid][-1], chances[uid]) for uid in going})
        for uid, turn in turns.items():
            turns_of[uid].append(turn)
    return turns_of


def test_a_game_by_hand():
    runner = make()
    problem = runner.environment.task.train[0]
    start = int(runner.reset({0: problem})[0].messages[0]["content"].split("\n\n")[1])
    assert runner.reset({1: problem})[1].messages[0]["content"] == f"Count to five.\n\n{start}\n\nMoves: one, two."
    turns = runner.step({0: say("One, or rather TWO."), 1: say("none of it, twofold")})
    assert turns[0].messages[0]["content"].startswith(f"{start + 2}\n\nMoves: one") and turns[0].reward == 0
    assert turns[1] == base.Turn([{"role": "user", "content": "That is no legal move.\n\nMoves: one, two."}], 0.0, False,
                                 {"luck": 0, "truncated": False, "invalid_move": True, "state": str(start), "action": ""})
    while start < 2:  # one and one are two
        runner.step({1: say("one")})
        start += 1
    last = runner.step({1: say("one")}) | runner.step({1: say("two")})
    assert last[1].done and last[1].reward == 1.0 and last[1].messages == [] and not last[1].info["invalid_move"]
    with pytest.raises(ValueError, match="trajectory 1 is not running: it has ended"):
        runner.step({1: say("one")})


def test_messages_without_a_legal_move():
    lenient, strict = make(), make(options={"strict": True})
    for runner in (lenient, strict):
        runner.reset(problems(runner, 1))
    turns = [lenient.step({0: say("seven")})[0] for _ in range(6)]
    assert [turn.done for turn in turns] == [False] * 5 + [True] and turns[-1].info["truncated"] and turns[-1].reward == 0
    turn = strict.step({0: say("seven")})[0]
    start = turn.info.pop("state")
    assert start in strict.replay(0)[0].messages[0]["content"]
    assert (turn.reward, turn.done, turn.info) == (
        -1.0, True, {"luck": -1, "truncated": False, "invalid_move": True, "action": ""})


@pytest.mark.parametrize("other", ["threads", "alone"])
def test_a_batch_equals_single_trajectories(other):
    compiled = make(options={"strict": True})
    turns_of = play(compiled, 21)  # three of each problem: different keys and randomness
    if other == "threads":
        assert turns_of == play(make("threads", options={"strict": True}), 21)
    else:
        assert turns_of == {uid: compiled.replay(uid) for uid in turns_of}
    lucks = {tuple(turn.info["luck"] for turn in turns[1:]) for turns in turns_of.values()}
    assert len(lucks) > 10 and len({turns[0].messages[0]["content"] for turns in turns_of.values()}) > 1


def test_turns_do_not_depend_on_other_trajectories():
    """Tables of 8, 16 and 64 rows, started together or one after the other, with rows that are freed and used again."""
    whole = play(make(), 40)
    assert play(make(), 5) == {uid: whole[uid] for uid in range(5)}
    runner, turns_of = make(), {}
    for uid in range(40):
        turns_of[uid] = [runner.reset({uid: problems(runner, 40)[uid]})[uid]]
        if uid % 3 == 2:  # two others are in progress
            for one in range(uid - 2, uid + 1):
                chance = random.Random(one)
                while not turns_of[one][-1].done:
                    turns_of[one].append(runner.step({one: words_of(runner.environment, turns_of[one][-1], chance)})[one])
    assert all(turns_of[uid] == whole[uid] for uid in range(39))
    assert len(runner._pool._table.count) == 8, "free rows were used again"


def test_held_out_problems_are_distinguished():
    runner = make()
    opened = runner.reset({0: runner.environment.task.train[0], 1: runner.environment.task.heldout[0]})
    assert ["apart" in opened[uid].messages[0]["content"] for uid in (0, 1)] == [False, True]


def test_trajectories_continue_in_the_middle():
    straight, first, second = make(), make(), make()
    for runner in (straight, first):
        runner.reset(problems(runner, 9))
        runner.step({uid: say("one") for uid in range(9)})
        runner.step({uid: say("nothing") for uid in range(0, 9, 2)})
    stopped = {uid: Recording(*json.loads(json.dumps([None, first.recording(uid).key, first.recording(uid).said])))._replace(
        problem=first.recording(uid).problem) for uid in range(9)}
    now = second.resume(stopped)
    first._pool.close()  # its states are dropped, and recomputed
    following = {uid: say("two" if uid % 2 else "one") for uid in range(9)}
    turns = straight.step(following)
    assert second.step(following) == turns == first.step(following)
    assert now[0].info["invalid_move"] and now[1].info["luck"] > 0 and len(second.recording(0).said) == 3
    with pytest.raises(ValueError, match="trajectory 0 was recorded with another key than that of seed=4"):
        make(seed=4).resume(stopped)


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_trajectories_of_other_kinds_continue_too(kind):
    runner, again = (make(kind, "guess_number", options={"highest": 10}, workers=1) for _ in range(2))
    try:
        runner.reset(problems(runner, 3))
        runner.step({uid: say("1") for uid in range(3)})
        again.resume({uid: runner.recording(uid) for uid in runner._running})
        assert again.step({uid: say("5") for uid in again._running}) == runner.step({uid: say("5") for uid in runner._running})
    finally:
        runner.close()
        again.close()
    never = make("threads", "faulty_environments:obedient", options={"replayable": False})
    with pytest.raises(ValueError, match="is not replayable, so its trajectories cannot be resumed"):
        never.resume({})


def test_rules_that_disagree_are_detected():
    runner = make()
    problem = problems(runner, 1)[0]
    call = StepRequest("", "{}", problem, 5, [say("one")], "another fingerprint")
    with pytest.raises(RuntimeError, match="environment 'counting' answered differently when problem 0 was replayed"):
        runner._pool.map([call])


def test_a_move_that_is_no_turn_loses_its_trajectory_alone():
    runner = make(options={"unruly": True})
    runner.reset(problems(runner, 3))
    turns = runner.step({0: say("one"), 1: say("two"), 2: say("one")})
    assert turns.keys() == {0, 2} and runner.invalid[1][:2] == ("rubbish", 1) and "reward nan" in runner.invalid[1].message
    assert runner.counts == {"counting/rubbish": 1} and runner.step({2: say("one")}).keys() == {2}
    lacking = make(options={"facts": {"skill": "count"}})
    lacking.reset(problems(lacking, 1))
    assert lacking.step({0: say("one")}) == {} and "info has skill=None" in lacking.invalid[0].message


def test_environments_without_arrays_are_not_compiled():
    with pytest.raises(ValueError, match="'guess_number' is no game of arrays, which can be compiled; use kind='processes'"):
        make(target="guess_number")
    around = {"environment": "counting_game:counting"}
    assert opening_of(environments.make("counting_game:counting")) and opening_of(environments.make("recent", **around)) is None
    with pytest.raises(ValueError, match="'counting.recent' is no game of arrays"):
        make(target="recent", options=around)
    with pytest.raises(ValueError, match="Unknown kind of runner 'compile'"):
        make("compile")


def test_keys_have_64_bits():
    np.testing.assert_array_equal(games.words64([2**64 - 1, 2**32 + 5, 3, -1]),
                                  [[2**32 - 1, 2**32 - 1], [1, 5], [0, 3], [2**32 - 1, 2**32 - 1]])


@pytest.mark.parametrize("text, action", [("B2", 3), ("a1, no: a2", 1), ("a22", -1), ("", -1), ("a1=2", 4), ("a1=", 0)])
def test_actions_are_read_as_whole_words(text, action):
    game = games.Game(words=("a1", "a2", "b1", "b2", "a1=2"), reset=None, step=None, legal=None, seen=None, text=None)
    assert games.action_of(game, say(text)) == action


def test_ways():
    assert shortest_way(0, lambda n: n == 5, lambda n: [("+1", n + 1), ("*2", 2 * n)]) == ["+1", "+1", "*2", "+1"]
    assert shortest_way(0, lambda n: n == 0, lambda n: []) == []
    with pytest.raises(ValueError, match="no way from 0"):
        shortest_way(0, lambda n: n == 1, lambda n: [])


# --- with the packages ----------------------------------------------------------------------------------------------------


GYMNAX = "gymnax is the extra of that name, which takes no jax 0.12"
STILL = {"settings": {"is_slippery": False}}
PLAYED = [("pgx_game", {"game": "tic_tac_toe"}), ("gymnax_game", {"game": "FrozenLake-misc"}),
          ("jumanji_game", {"game": "Maze-v0"})]
MORE = [*(("pgx_game", {"game": game}) for game in ("connect_four", "othello", "kuhn_poker", "2048")),
        *(("gymnax_game", {"game": game}) for game in ("FourRooms-misc", "Catch-bsuite", "Breakout-MinAtar", "CartPole-v1",
                                                       "MountainCar-v0")),
        *(("jumanji_game", {"game": game}) for game in ("SlidingTilePuzzle-v0", "Minesweeper-v0", "Sudoku-very-easy-v0"))]


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [*PLAYED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)])
def test_games_of_packages_play_alike_alone_and_together(name, options):
    pytest.importorskip(name.removesuffix("_game"), reason=f"needs the extra of {name}")
    runner = make(target=name, options={**options, "turns": 12})
    turns_of = play(runner, 12)
    for uid, turns in turns_of.items():
        assert turns == runner.replay(uid) and sum(turn.reward for turn in turns) <= runner.environment.returns[1]
    assert any(len(turns) > 2 for turns in turns_of.values())


def test_tic_tac_toe_has_the_rules_that_we_know():
    pytest.importorskip("pgx")
    runner = make(target="pgx_game", options={"selfplay": True, "brief": True})
    chance = random.Random(1)
    for uid in range(12):
        turn = runner.reset({uid: runner.environment.task.train[uid]})[uid]
        while not turn.done:
            shown, side = turn.messages[0]["content"].rsplit("\n", 1)
            board = "".join("." if square.isdigit() else square for square in shown.replace("\n", ""))
            assert side == "XO"[(9 - board.count(".")) % 2] and turn.messages[0]["content"] == shown_board(board, True)
            square = chance.randrange(9)
            free = board[square] == "."
            after = played(board, square) if free else board
            turn = runner.step({uid: say(str(square + 1))})[uid]
            won = winner(after)
            assert turn.info["invalid_move"] == (not free) and turn.reward == 0.0 and turn.info["agent"] == "XO".index(side)
            assert turn.done == (not free or won is not None or "." not in after)
            if turn.done:
                lost = "XO".index(side) if not free else None if won is None else 1 - won
                assert turn.info["returns"] == ([0, 0] if lost is None else [1.0 - 2 * (lost == agent) for agent in (0, 1)])
            else:
                assert "returns" not in turn.info


def test_in_poker_each_agent_reads_its_own_card():
    """X passes, O bets, X bets or gives up: two chips for the higher card, or one for O."""
    pytest.importorskip("pgx")
    runner = make(target="pgx_game", options={"game": "kuhn_poker", "selfplay": True, "opening": 0})
    assert runner.environment.apart and runner.environment.returns == (-2.0, 2.0)
    opened = runner.reset({uid: runner.environment.task.train[uid] for uid in range(8)})
    answered = runner.step({uid: say("I pass") for uid in range(8)})
    raised = runner.step({uid: say("bet") for uid in range(8)})
    ended = runner.step({uid: say("bet" if uid % 2 else "pass") for uid in range(8)})
    seen = set()
    for uid in range(8):
        rules, first = opened[uid].messages
        second, third = answered[uid].messages[0], raised[uid].messages[0]
        assert rules["role"] == "system" and "reader" not in rules
        assert [message["reader"] for message in (first, second, third)] == [0, 1, 0]
        mine, other = (text["content"].split()[3].rstrip(".") for text in (first, second))
        assert mine != other and third["content"].startswith(f"Your card is {mine}. You have bet 0, the other player 1.")
        assert "You are X" in first["content"] and second["content"].startswith(f"Your card is {other}. You have bet 0, ")
        chips = -1 if uid % 2 == 0 else 2 if "JQK".index(mine) > "JQK".index(other) else -2
        assert ended[uid].done and ended[uid].info["returns"] == [chips, -chips] and ended[uid].info["agent"] == 0
        assert ended[uid] == runner.replay(uid)[-1]
        seen.add((mine, other))
    assert len(seen) > 2


def test_a_game_that_is_cut_has_no_returns():
    pytest.importorskip("pgx")
    runner = make(target="pgx_game", options={"selfplay": True, "opening": 0, "turns": 6, "brief": True})
    turns = runner.reset({uid: runner.environment.task.train[uid] for uid in range(2)})
    for squares in zip("123587", "12539 "):  # the second game is won by the fifth move
        turns |= runner.step({uid: say(square) for uid, square in enumerate(squares) if not turns[uid].done})
    assert turns[1].done and not turns[1].info["truncated"] and turns[1].info["returns"] == [1, -1]
    assert turns[0].done and turns[0].info["truncated"] and "returns" not in turns[0].info
    assert turns[0].info["action"] == "7" and turns[0].info["state"] == "XOX\n4O6\n7X9\nO"


@pytest.mark.slow
def test_games_for_two_against_chance():
    """The policy's side moves first and the reward is that of this side; the other side moves by the key."""
    pytest.importorskip("pgx")
    runner = make(target="pgx_game", options={"opening": 0})
    problem, answers, perfect = runner.environment.task.train[0], set(), []
    for uid in range(12):
        (state, turn) = base.begin(runner.environment, problem, base.key_of(3, uid))
        assert "You are X." in turn.messages[0]["content"]
        answers.add(base.advance(runner.environment, state, say("5")).messages[0]["content"])
        turn = turn._replace(done=False)
        while not turn.done:
            turn = base.advance(runner.environment, state, say(runner.environment.oracle(state)))
        perfect.append(turn.reward)
    assert len(answers) > 4 and min(perfect) >= 0 and sum(perfect) > 6
    heldout = make(target="pgx_game", options={"selfplay": True})
    state, turn = base.begin(heldout.environment, heldout.environment.task.heldout[0], 0)
    while not turn.done:
        turn = base.advance(heldout.environment, state, say(heldout.environment.oracle(state)))
    assert turn.reward in (0.0, 1.0) and turn.reward == turn.info["returns"][turn.info["agent"]]


@pytest.mark.slow
def test_the_return_of_2048_is_its_largest_tile():
    pytest.importorskip("pgx")
    environment = environments.make("pgx_game", game="2048", brief=True)
    state, turn = base.begin(environment, environment.task.train[2], 7)
    first, total, chance = turn.messages[0]["content"], 0.0, random.Random(0)
    while not turn.done:
        seen = turn.messages[0]["content"]
        turn = base.advance(environment, state, say(chance.choice(environment.choices(state))))
        total += turn.reward
    def largest(text):
        return np.log2(max(int(tile) for tile in text.split() if tile != "."))
    assert abs(total * 11 - (max(largest(seen), np.max(state.shown.seen)) - largest(first))) < 1e-5 and largest(seen) >= 4


def test_a_walk_over_the_ice():
    pytest.importorskip("gymnax", reason=GYMNAX)
    environment = environments.make("gymnax_game", **STILL, brief=True)
    state, opening = base.begin(environment, environment.task.train[0], 0)
    assert opening.messages[0]["content"] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    turns = [base.advance(environment, state, say(word)) for word in "down down right right down right".split()]
    assert turns[0].messages[0]["content"] == "SFFF\n[F]HFH\nFFFH\nHFFG"
    assert [turn.reward for turn in turns] == [0.0] * 5 + [1.0] and turns[-1].done
    assert environments.make("gymnax_game").oracle is None, "on slippery ice no policy always arrives"


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    ("pgx_game", {}), ("pgx_game", {"game": "2048", "turns": 20}), ("gymnax_game", STILL),
    ("gymnax_game", {"game": "Catch-bsuite"}), ("jumanji_game", {}), ("jumanji_game", {"game": "SlidingTilePuzzle-v0"})])
def test_games_pass_the_audit(name, options, capsys):
    pytest.importorskip(name.removesuffix("_game"), reason=f"needs the extra of {name}")
    assert audit.main([name, f"--options={json.dumps(options)}", "--trajectories=4"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name, extra", [("pgx_game", "environments"), ("gymnax_game", "gymnax"),
                                         ("jumanji_game", "environments")])
def test_unplayable_games_are_named(name, extra, monkeypatch):
    package = name.removesuffix("_game")
    with pytest.raises(ValueError, match=f"Unknown game of {package} 'go'"):
        environments.make(name, game="go")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ValueError, match=rf"needs the package {package}, .*pip install 'jaxrl_llm\[{extra}\]'"):
            environments.make(name)


def test_settings_that_games_do_not_have():
    pytest.importorskip("gymnax", reason=GYMNAX)
    with pytest.raises(ValueError, match="FrozenLake-misc with .*'ice'.*its params are max_steps_in_episode"):
        environments.make("gymnax_game", params={"ice": 1})
    with pytest.raises(ValueError, match="FrozenLake-misc with settings={'ice': 1}"):
        environments.make("gymnax_game", settings={"ice": 1})
    pytest.importorskip("jumanji")
    with pytest.raises(ValueError, match="size=4 of Sudoku-very-easy-v0; allowed are 2 to 26, 9 of Sudoku"):
        environments.make("jumanji_game", game="Sudoku-very-easy-v0", size=4)
