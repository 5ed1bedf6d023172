"""The games: their worlds, and messages that try to win without playing."""
import pytest

from jaxrl_llm import environments
from jaxrl_llm.environments import base
from jaxrl_llm.environments.treasure import DIRECTIONS, _beside, _way, make_maze
from jaxrl_llm.environments.words import last_word


def play(environment, problem, *texts):
    state, _ = base.begin(environment, problem, 0)
    return [base.advance(environment, state, {"role": "assistant", "content": text}) for text in texts], state


def problem_of(environment, hidden):
    return next(p for side in (environment.task.train, environment.task.heldout) for p in side if p.answer == str(hidden))


def test_guess_number_word_by_word():
    environment = environments.make("guess_number", highest=20)
    turns, state = play(environment, problem_of(environment, 7), "It is 12", "3?", "seven", "7")
    assert [turn.messages[0]["content"] for turn in turns[:3]] == [
        "Mine is lower than 12. 4 left.", "Mine is higher than 3. 3 left.", "That is no number. 2 left."]
    assert turns[3] == base.Turn([], 1.0, True, {"guesses_left": 1, "state": [4, 11, 2], "action": 7})
    assert (state.low, state.high) == (4, 11)


def test_a_list_of_all_numbers_is_one_guess():
    environment = environments.make("guess_number", highest=20)
    everything = " ".join(map(str, range(1, 21)))
    turns, _ = play(environment, problem_of(environment, 7), *[everything] * 5)
    assert [turn.reward for turn in turns] == [0.0] * 5 and turns[-1].done
    assert turns[0].messages[0]["content"].startswith("Mine is lower than 20.")
    turns, _ = play(environment, problem_of(environment, 7), "9" * 40, "0", "-7 " + "8" * 3)
    assert not any(turn.reward for turn in turns)


def test_every_number_is_found_by_halving_and_is_on_one_side():
    environment = environments.make("guess_number", highest=33)
    hidden = [int(p.answer) for side in (environment.task.train, environment.task.heldout) for p in side]
    assert sorted(hidden) == list(range(1, 34)) and len(environment.task.heldout) > 0
    for side in (environment.task.train, environment.task.heldout):
        for problem in side:
            state, turn = base.begin(environment, problem, 0)
            while not turn.done:
                turn = base.advance(environment, state, {"role": "assistant", "content": environment.oracle(state)})
            assert turn.reward == 1.0
    with pytest.raises(ValueError, match="highest=9; give at least 10"):
        environments.make("guess_number", highest=9)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_mazes_are_connected_and_made_by_their_seed(size):
    mazes = [make_maze(size, f"0 {number}") for number in range(50)]
    for maze in mazes:
        assert all(_way(maze, (0, 0), place) is not None for place in maze.doors)
        for place, doors in maze.doors.items():
            for name in doors:
                there = _beside(place, name)
                assert there in maze.doors and len({"north", "south"} & {name} | {"east", "west"} & {name}) == 1
                back = {"north": "south", "south": "north", "east": "west", "west": "east"}[name]
                assert back in maze.doors[there], "doors lead both ways"
        count = sum(map(len, maze.doors.values())) // 2
        assert count in (size * size - 1, size * size), "a tree, and at most one door more"
        assert len({maze.here, maze.key, maze.chest}) == 3 and len(set(maze.names.values())) == size * size
    assert make_maze(size, "0 3") == mazes[3] and len({str(maze) for maze in mazes}) > 40


def test_treasure_word_by_word():
    environment = environments.make("treasure", size=2)
    state, opening = base.begin(environment, environment.task.train[0], 0)
    assert "take key" in opening.messages[0]["content"]

    def step(text):
        return base.advance(environment, state, {"role": "assistant", "content": text})

    state.here = state.chest
    assert "Nothing happens." in step("open chest").messages[0]["content"], "not without the key"
    assert "Nothing happens." in step("take key").messages[0]["content"]
    state.here = state.key
    assert "Taken." in step("I TAKE KEY now").messages[0]["content"] and state.key is None
    wall = next(name for name in DIRECTIONS if name not in state.doors[state.here])
    here = state.here
    assert f"There is no door to the {wall}." in step(f"go {wall}").messages[0]["content"] and state.here == here
    assert "Nothing happens." in step("go northwest, gonorth").messages[0]["content"] and state.here == here
    state.here = state.chest
    assert step("take key, open chest").reward == 1.0, "the last command counts"


def test_commands_run_out():
    environment = environments.make("treasure")
    for text in ("", "open chest"):
        state, turn = base.begin(environment, environment.task.train[3], 0)
        limit, count, total = state.left, 0, 0.0
        while not turn.done:
            turn = base.advance(environment, state, {"role": "assistant", "content": text})
            count, total = count + 1, total + turn.reward
        assert count == limit and total == 0.0
    with pytest.raises(ValueError, match="size=9; allowed are 2 to 5"):
        environments.make("treasure", size=9)


DIGITS = [str(number) for number in range(10)]


@pytest.mark.parametrize("words, text, word", [
    (DIGITS, "-1", None), (DIGITS, "1.5", None), (DIGITS, ".5", None), (DIGITS, "\u22121", None), (DIGITS, "10", None),
    (DIGITS, "x5", None),
    (DIGITS, "I take 5.", "5"), (DIGITS, "(4) or [5]", "5"), (DIGITS, "3, 4,5", "5"), (DIGITS, "1-2", "2"),
    (DIGITS, "5 or -3", "5"),
    (["-1", "0", "1"], "-1", "-1"), (["0.5", "1.5"], "say 1.5", "1.5"), (["left", "right"], "Go LEFT!", "left"),
    (["Left", "left"], "left", "left"), (["Left", "left"], "LEFT", None), (["turn", "turn left"], "Turn Left", "turn left"),
    (["left"], "leftover", None), (["go-left", "left"], "go-left", "go-left")])
def test_the_last_word_that_names_an_action(words, text, word):
    number = last_word(words, text)
    assert (words[number] if number >= 0 else None) == word


def test_environments_of_gymnasium_read_whole_numbers_and_any_case():
    pytest.importorskip("gymnasium")
    for actions, texts in ((None, {"-1": "", "1.5": "", "1": "1"}),
                           (["left", "down", "right", "up"], {"LEFT": "left", "Up.": "up"})):
        environment = environments.make("gymnasium_text", env_id="FrozenLake-v1", actions=actions)
        for text, action in texts.items():
            state, _ = base.begin(environment, environment.task.train[0], 0)
            assert base.advance(environment, state, {"role": "assistant", "content": text}).info["action"] == action


@pytest.mark.parametrize("text, guess", [("-5", ""), ("1.5", ""), ("1234567890123", ""), ("5", 5), ("7 or 5.", 5), ("x5", 5)])
def test_parts_of_numbers_are_neither_guesses_nor_squares(text, guess):
    for name, free in (("guess_number", guess), ("tic_tac_toe", str(guess))):
        environment = environments.make(name)
        state, _ = base.begin(environment, environment.task.train[0], 0)
        assert base.advance(environment, state, {"role": "assistant", "content": text}).info["action"] == free
