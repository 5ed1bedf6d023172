"""Environments of other packages, where they are installed."""
import random
import re
import sys

import numpy as np
import pytest

from jaxrl_llm import environments
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.contrib import textarena_list
from jaxrl_llm.contrib.textarena_game import private
from jaxrl_llm.environments import base


def say(text):
    return {"role": "assistant", "content": text}


LAKE = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "returns": (0.0, 1.0)}


def test_a_drawn_environment_of_gymnasium():
    pytest.importorskip("gymnasium")
    environment = environments.make("gymnasium_text", **LAKE, options={"is_slippery": False}, rules="Reach G.")
    state, opening = base.begin(environment, environment.task.train[0], 0)
    assert opening.messages[0]["content"] == "Reach G. Answer with one of: left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    reply = base.advance(environment, state, say("I jump")).messages
    assert reply == [{"role": "user", "content": "Answer with one of: left, down, right, up."}]
    turns = [base.advance(environment, state, say(f"not up, {word}")) for word in "down down right right down right".split()]
    assert turns[0].messages[0]["content"].endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [turn.reward for turn in turns] == [0.0] * 5 + [1.0] and [turn.done for turn in turns] == [False] * 5 + [True]


def test_words_for_actions_may_hold_others_and_signs():
    pytest.importorskip("gymnasium")
    environment = environments.make("gymnasium_text", **{**LAKE, "actions": ["left", "down", "down right", "-1"]})
    state, _ = base.begin(environment, environment.task.train[0], 0)
    taken: list[int] = []
    state.inside = type("Taken", (), {"step": lambda self, action: taken.append(action) or ("text", 0.0, False, False, {})})()
    for text in ("go down right", "left, then down", "I say -1", "downright"):
        base.advance(environment, state, say(text))
    assert taken == [2, 1, 3]


def test_chance_in_gymnasium_is_that_of_the_key():
    pytest.importorskip("gymnasium")
    environment = environments.make("gymnasium_text", **LAKE)
    def walk(problem, key):
        return base.replay(environment, environment.task.train[problem], key, [say("left"), say("right"), say("left")])[1]
    walks = [base.digest(walk(0, key)) for key in range(8)]
    assert walks == [base.digest(walk(0, key)) for key in range(8)] and len(set(walks)) > 2
    assert all(walk(0, key)[0] == walk(0, 0)[0] for key in range(8))


def test_an_environment_of_gymnasium_that_speaks(monkeypatch):
    gymnasium = pytest.importorskip("gymnasium")

    class Parrot(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return f"Say {self.np_random.integers(10)}", {}

        def step(self, action):
            return action.upper(), float(len(action)), action == "end", action == "stop", {}

    gymnasium.register("Parrot-v0", Parrot, disable_env_checker=True, order_enforce=False)
    environment = environments.make("gymnasium_text", env_id="Parrot-v0", turns=3)
    state, opening = base.begin(environment, environment.task.train[3], 0)
    assert opening.messages[0]["content"] == f"Say {np.random.default_rng(3).integers(10)}" and environment.choices is None
    assert base.advance(environment, state, say("hi")) == base.Turn(
        [{"role": "user", "content": "HI"}], 2.0, False, {"truncated": False})
    assert base.advance(environment, state, say("end")).info == {"truncated": False}
    state, _ = base.begin(environment, environment.task.train[3], 0)
    assert [base.advance(environment, state, say("hi")).done for _ in range(3)] == [False, False, True]


def test_environments_of_gymnasium_that_cannot_be_read():
    pytest.importorskip("gymnasium")
    for settings, why in (({"env_id": "CartPole-v1"}, "cannot draw itself as text; allowed are a Text space"),
                          ({"env_id": "FrozenLake-v7"}, "gymnasium cannot make 'FrozenLake-v7'"),
                          ({"env_id": "FrozenLake-v1", "actions": ["left"]}, "1 actions for FrozenLake-v1, which has 4")):
        with pytest.raises(ValueError, match=why):
            environments.make("gymnasium_text", **settings)


def test_a_game_of_textarena():
    pytest.importorskip("textarena")
    random.seed(7)
    outside = random.getstate()
    environment = environments.make("textarena_game", game="GuessTheNumber-v0")
    problem = environment.task.train[0]
    state, opening = base.begin(environment, problem, 0)
    other, _ = base.begin(environment, problem, 1)
    assert "between 1 and 20" in opening.messages[0]["content"]
    low, high, turn = 1, 20, opening
    while not turn.done:
        middle = (low + high) // 2
        turn = base.advance(environment, state, say(f"[{middle}]"))
        if not turn.done:
            assert f"[{middle}]" not in turn.messages[0]["content"], "not the player's own message"
            low, high = (low, middle - 1) if "lower" in turn.messages[0]["content"] else (middle + 1, high)
    assert (turn.reward, turn.info["invalid_move"], turn.info["action"]) == (1.0, False, [f"[{middle}]"])
    assert base.advance(environment, other, say(f"[{middle}]")).reward == 1.0, "of one problem, hence the same number"
    assert random.getstate() == outside, "the random numbers of this process are left alone"


def texts(turn):
    return "\n".join(message["content"] for message in turn.messages)


def test_a_game_of_textarena_for_two_is_played_on_both_sides():
    pytest.importorskip("textarena")
    environment = environments.make("textarena_game", game="TicTacToe-v0")
    state, opening = base.begin(environment, environment.task.train[0], 0)
    assert "You are Player 0" in texts(opening) and "Available Moves: '[0]', '[1]'" in texts(opening)
    turns = [base.advance(environment, state, say(f"I take [{square}]")) for square in (4, 0, 3, 1, 5)]
    assert "You are Player 1" in texts(turns[0]) and texts(turns[0]).count("Current Board:") == 1, "a joint message comes once"
    assert "You are Player" not in texts(turns[1]) and "Player 1 placed their symbol (X) in cell 0." in texts(turns[1])
    assert all("I take" not in texts(turn) for turn in turns), "the conversation already has the policy's messages"
    assert [turn.info["agent"] for turn in turns] == [0, 1, 0, 1, 0] and [turn.reward for turn in turns] == [0.0] * 5
    assert [turn.done for turn in turns] == [False] * 4 + [True] and turns[-1].info["returns"] == [1.0, -1.0]
    lost = base.replay(environment, environment.task.train[0], 0, [say("[9]"), say("nothing")])[1]
    assert "invalid move" in texts(lost[1]) and lost[1].info["agent"] == lost[2].info["agent"] == 0
    assert lost[2].done and lost[2].info["returns"] == [-1.0, 1.0] and lost[2].info["invalid_move"]
    short = environments.make("textarena_game", game="TicTacToe-v0", turns=1)
    cut = base.replay(short, short.task.train[0], 0, [say("[4]")])[1][-1]
    assert cut.done and "returns" not in cut.info, "a game without an end has no returns"


def test_held_out_games_for_two_are_against_random_moves():
    pytest.importorskip("textarena")
    random.seed(7)
    outside = random.getstate()
    environment = environments.make("textarena_game", game="TicTacToe-v0")
    first, second = environment.task.heldout[0], environment.task.heldout[1]
    openings = [base.begin(environment, problem, key)[1] for problem in (first, second) for key in range(3)]
    assert all("You are Player 0" in texts(one) and "O" not in texts(one).partition("Board")[2] for one in openings[:3])
    assert all("You are Player 1" in texts(one) and "Player 0 placed their symbol" in texts(one) for one in openings[3:])
    assert openings[3] == openings[4] == openings[5], "the first move depends on the problem alone"
    outcomes = set()
    for key in range(12):
        for problem, seat in ((first, 0), (second, 1)):
            state, turn = base.begin(environment, problem, key)
            while not turn.done:
                moves = [part.split("]")[0] for part in texts(turn).rpartition("Available Moves:")[2].split("[")[1:]]
                turn = base.advance(environment, state, say(f"[{moves[0]}]"))
                assert turn.info["agent"] == seat
            assert turn.reward == turn.info["returns"][seat] == -turn.info["returns"][1 - seat]
            outcomes.add(turn.reward)
    assert {1.0, -1.0} <= outcomes and random.getstate() == outside


def test_the_audit_of_a_game_for_two(capsys):
    pytest.importorskip("textarena")
    assert audit.main(["textarena_game", '--options={"game": "TicTacToe-v0"}', "--trajectories=4"]) == 0
    assert "FAILS" not in capsys.readouterr().out


@pytest.mark.parametrize("game, why", [
    ("KuhnPoker-v0", r"player 0 alone reads .*Your card is"), ("SimpleNegotiation-v0", "player 0 alone reads .*Value: "),
    ("IteratedRockPaperScissors-v0", "player 1 does not see what player 0 does"),
    ("IteratedPrisonersDilemma-v0", "player 1 does not see what player 0 does")])
def test_in_games_of_textarena_that_hide_something_players_read_conversations_of_their_own(game, why):
    textarena = pytest.importorskip("textarena")
    random.seed(7)
    outside = random.getstate()
    made = environments.make("textarena_game", game=game)
    assert random.getstate() == outside and re.match(why, private(textarena, game))
    assert (made.apart, made.contexts) == (True, 2)
    state, opening = base.begin(made, made.task.train[0], 0)
    common, own = base.addressed(opening.messages)
    assert common == [{"role": "system", "content": f"You play {game}."}] and own[0]["reader"] == state.player
    shown = environments.make("textarena_game", game=game, show_private=True)
    state, opening = base.begin(shown, shown.task.train[0], 0)
    assert (shown.apart, shown.contexts) == (False, 1) and "reader" not in opening.messages[0]
    assert base.advance(shown, state, say("[pass]")).info["agent"] in (0, 1) and texts(opening)


def test_players_of_poker_read_their_own_cards_alone():
    pytest.importorskip("textarena")
    made = environments.make("textarena_game", game="KuhnPoker-v0")
    cards = set()
    for problem in (made.task.train[i] for i in range(6)):
        _, turns = base.replay(made, problem, 0, [say("[check]"), say("Bluff? [bet]"), say("[call]")])
        first = turns[0].messages[-1]["reader"]
        assert [turn.messages[-1]["reader"] for turn in turns[:3]] == [first, 1 - first, first]
        assert [turn.info["agent"] for turn in turns[1:]] == [first, 1 - first, first]
        read = [texts(turn) for turn in turns]
        (own,), (other,) = ({*re.findall("Your card is: '(.)'", text)} for text in read[:2])
        assert own != other and "Your card" not in read[2]
        assert f"Player {first}: [check]" in read[1] and f"Player {1 - first}: Bluff? [bet]" in read[2]
        assert all(f"Player {speaker}: " not in text for speaker, text in zip((first, 1 - first, first), read))
        cards.add((own, other))
    assert len(cards) > 2
    state, opening = base.begin(made, made.task.heldout[1], 0)  # against random moves it reads the same conversation
    assert opening.messages[-1]["reader"] == state.player == 1 and "Your card is" in texts(opening)


def test_moves_at_the_same_time_are_hidden_until_both_are_made():
    pytest.importorskip("textarena")
    made = environments.make("textarena_game", game="IteratedRockPaperScissors-v0")
    _, turns = base.replay(made, made.task.train[0], 0, [say("I am sure: [rock]"), say("[paper]"), say("[rock]")])
    assert [turn.messages[-1]["reader"] for turn in turns] == [0, 1, 0, 1]
    assert "rock" not in texts(turns[1]).partition("[s]")[2] and "sure" not in texts(turns[1])
    assert texts(turns[2]) == texts(turns[3]) == "Round result: Player 1 wins!"


@pytest.mark.parametrize("game", ["TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "Othello-v0-tiny", "IteratedUltimatumGame-v0"])
def test_public_games_of_textarena_are_played(game):
    pytest.importorskip("textarena")
    environment = environments.make("textarena_game", game=game)
    state, _ = base.begin(environment, environment.task.train[0], 0)
    assert base.advance(environment, state, say("[0]")).info["agent"] == 0


def test_hidden_moves_that_random_play_does_not_find_are_errors():
    """[<number>] is what the rules write in brackets, and is no guess."""
    pytest.importorskip("textarena")
    environment = environments.make("textarena_game", game="IteratedTwoThirdsAverage-v0")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    assert not base.advance(environment, state, say("no number")).done
    with pytest.raises(ValueError, match="player 1 does not see what player 0 does, but both read one.*apart=True gives each"):
        base.advance(environment, state, say("[50]"))
    apart = environments.make("textarena_game", game="IteratedTwoThirdsAverage-v0", apart=True)
    read = [texts(turn) for turn in base.replay(apart, apart.task.train[0], 0, [say("[50]"), say("[30]")])[1]]
    assert "50" not in read[1] and read[2].startswith("Player 0 guessed 50.0; Player 1 guessed 30.0.")
    shown = environments.make("textarena_game", game="IteratedTwoThirdsAverage-v0", show_private=True)
    assert len(base.replay(shown, shown.task.train[0], 0, [say("[50]"), say("[30]")])[1]) == 3
    alone, turn = base.begin(environment, environment.task.heldout[0], 0)  # against random moves nothing is shown
    assert base.advance(environment, alone, say("[50]")).info["agent"] == 0


def test_games_of_textarena_that_cannot_be_played():
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match="textarena has no game 'Nothing-v0'"):
        environments.make("textarena_game", game="Nothing-v0")
    with pytest.raises(ValueError, match="ThreePlayerIPD-v0 is no game for one player or two"):
        environments.make("textarena_game", game="ThreePlayerIPD-v0")
    for game, options in (("GuessTheNumber-v0", {}), ("KuhnPoker-v0", {"show_private": True})):
        with pytest.raises(ValueError, match="conversations are apart in games for two"):
            environments.make("textarena_game", game=game, apart=True, **options)


def test_the_games_of_textarena_that_begin_without_a_network(monkeypatch, capfd):
    textarena = pytest.importorskip("textarena")
    known = textarena.envs.registration.ENV_REGISTRY
    chosen = {name: spec for name, spec in known.items()
              if name.startswith(("TicTacToe-v0", "KuhnPoker-v0", "GuessTheNumber-v0", "Debate-v0"))}
    monkeypatch.setattr(textarena.envs.registration, "ENV_REGISTRY", chosen)
    result = {game.name: game for game in textarena_list.games()}
    assert (result["GuessTheNumber-v0"].players, result["TicTacToe-v0"].players, result["KuhnPoker-v0"].players) == (1, 2, 2)
    assert result["KuhnPoker-v0"].private.startswith("player 0 alone reads \"### Starting round 1")
    assert not result["TicTacToe-v0"].private and not result["GuessTheNumber-v0"].private
    assert result["Debate-v0"].players == 0 and "API key" in result["Debate-v0"].why
    assert textarena_list.main() == 0
    printed = capfd.readouterr().out
    assert "KuhnPoker-v0  players 2  private: player 0 alone reads " in printed and "TicTacToe-v0  players 2\n" in printed


@pytest.mark.parametrize("name, package, options", [
    ("gymnasium_text", "gymnasium", LAKE), ("textarena_game", "textarena", {}), ("mcp_tools", "mcp", {"servers": {}}),
    ("openenv_server", "openenv", {"url": "x"}), ("verifiers_env", "verifiers", {"taskset": "x"}),
    ("tinker_cookbook_env", "tinker_cookbook", {"dataset": "x:y"})])
def test_the_missing_package_is_named(name, package, options, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    named = package.replace("_", "-")
    extra = "environments" if package in ("gymnasium", "textarena") else named
    with pytest.raises(ValueError, match=rf"environment needs the package {named}, .*pip install 'jaxrl_llm\[{extra}\]'"):
        environments.make(name, **options)
