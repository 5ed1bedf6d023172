"""Environments of several agents: speakers, rewards, and moves that earn nothing."""
import pytest

from jaxrl_llm import environments, sandbox
from jaxrl_llm.audits import environments as audit
from jaxrl_llm.environments import base
from jaxrl_llm.environments.skill_chain import skills, uses
from jaxrl_llm.environments.tic_tac_toe import best_move, free, played, shown, value, winner

linux = pytest.mark.skipif(bool(sandbox.best().missing), reason="no sandbox with all barriers on this machine")


def say(environment, state, *texts):
    return [base.advance(environment, state, {"role": "assistant", "content": text}) for text in texts]


def of_board(environment, board):
    return next(p for side in (environment.task.train, environment.task.heldout) for p in side if p.extra["board"] == board)


def test_the_policy_plays_both_sides_and_both_are_paid():
    environment = environments.make("tic_tac_toe", brief=True)
    problem = next(p for p in environment.task.train if p.extra["board"].count(".") == 8)
    state, opening = base.begin(environment, problem, 0)
    assert opening.messages[0]["content"].endswith("\nO") and not problem.extra["alone"]
    state.board = "XX.OO...."
    (turn,) = say(environment, state, "I take 3")
    assert turn == base.Turn([], 0, True, {
        "agent": 0, "functional_group": 0, "game": 0, "state": "XX.OO....", "action": "3", "returns": [1, -1]})
    state.board = "XX.OO...X"
    turns = say(environment, state, "7", "3")
    assert [turn.info["agent"] for turn in turns] == [1, 0] and turns[1].info["returns"] == [1, -1]
    assert turns[0].messages[0]["content"] == "XX3\nOO6\nO8X\nX" and not turns[0].done and turns[0].reward == 0


@pytest.mark.parametrize("text", ["1", "", "ten", "10", "0", "3 or 1"])
def test_a_square_that_is_not_free_loses(text):
    environment = environments.make("tic_tac_toe")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    state.board = "X........"
    (turn,) = say(environment, state, text)
    assert turn.done and turn.info["returns"] == [1, -1] and turn.info["invalid_move"]


def test_a_full_board_is_a_draw():
    environment = environments.make("tic_tac_toe")
    state, _ = base.begin(environment, environment.task.train[0], 0)
    state.board = "XOXXOO.XO"
    (turn,) = say(environment, state, "7")
    assert turn.done and turn.info["returns"] == [1, -1]  # X has the left column
    state.board = "XOXXOOOX."
    (turn,) = say(environment, state, "9")
    assert turn.done and turn.info["returns"] == [0, 0]


def test_held_out_games_are_against_random_moves_that_follow_the_key():
    environment = environments.make("tic_tac_toe")
    problem = environment.task.heldout[0]
    assert problem.extra["alone"]
    boards = set()
    for key in range(20):
        state, _ = base.begin(environment, problem, key)
        side, turn = state.side, None
        while turn is None or not turn.done:
            (turn,) = say(environment, state, environment.oracle(state))
            assert turn.info["agent"] == side
        assert turn.reward == turn.info["returns"][side]
        boards.add(state.board)
        messages = [{"role": "assistant", "content": environment.oracle(base.begin(environment, problem, key)[0])}]
        assert base.replay(environment, problem, key, messages)[1] == base.replay(environment, problem, key, messages)[1]
    assert len(boards) > 3


def test_perfect_play_ends_in_a_draw_and_beats_what_blunders():
    assert value("." * 9) == 0 and value("XX.OO....") == 1 and value("XX.O.....") == -1  # X moves, then O, which is lost
    board = "." * 9
    while free(board) and winner(board) is None:
        board = played(board, best_move(board))
    assert winner(board) is None
    assert shown("X........", True) == "X23\n456\n789\nO" and "You are O." in shown("X........", False)


def test_every_board_is_on_one_side():
    environment = environments.make("tic_tac_toe")
    boards = [p.extra["board"] for side in (environment.task.train, environment.task.heldout) for p in side]
    assert len(boards) == len(set(boards)) == 81 and 8 <= len(environment.task.heldout) <= 24


def test_a_verifier_grants_another_answer():
    environment = environments.make("solver_verifier")
    problem = environment.task.train[0]
    right, wrong = problem.answer, str(int(problem.answer) + 1)

    def play(*texts):
        state, _ = base.begin(environment, problem, 0)
        return say(environment, state, *texts)

    turns = play(wrong, "No.", right)
    assert [turn.info["agent"] for turn in turns] == [0, 1, 0] and [turn.reward for turn in turns] == [0, 0, 1]
    assert turns[0].messages[0]["content"].startswith("Is this answer right?") and turns[2].done
    assert [turn.reward for turn in play(right, "yes")] == [0, 1] and play(wrong, "yes")[1].reward == 0
    assert play(right, "hm")[1].reward == 1  # no verdict accepts
    assert play(wrong, "yes no", wrong)[2].done and play(right, "no", wrong)[2].reward == 0
    (only,) = say(environment := environments.make("solver_verifier", loops=1), base.begin(environment, problem, 0)[0], right)
    assert only.done and only.reward == 1
    with pytest.raises(ValueError, match="loops=0"):
        environments.make("solver_verifier", loops=0)


def test_a_memory_takes_the_place_of_the_history():
    environment = environments.make("memory_use", options={"level": "mul2"}, contexts=3)
    problem = environment.task.train[3]
    expression, answer = problem.prompt.removesuffix("="), problem.answer
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'

    def play(*texts):
        state, opening = base.begin(environment, problem, 0)
        return opening, say(environment, state, *texts)

    opening, (called, kept, answered) = play(call % expression, f"hm <memory> it is {answer} </memory>", answer)
    assert [message["content"] for message in opening.messages] == [problem.prompt]
    assert called.messages[0]["content"].startswith(f"{answer}\nWrite what you need") and not called.fresh
    assert kept.fresh and kept.messages == [{"role": "user", "content": f"Memory: it is {answer}"}]
    assert answered.done and answered.reward == 1 and play(answer)[1][0].reward == 1
    assert play(call % expression, "no tags")[1][-1] == base.Turn([], 0, True, {"format_failure": True})
    assert play(call % expression, "<memory>a<memory>b</memory>")[1][-1].messages[0]["content"] == "Memory: b"
    assert play("<tool_call>{")[1][-1].info == {"format_failure": True} and play("")[1][-1].done
    last = play(*[call % expression, "<memory>1</memory>"] * 2, call % expression)[1][-1]
    assert last.done and last.reward == 0 and last.info == {"format_failure": False}
    with pytest.raises(ValueError, match="contexts=1; give two"):
        environments.make("memory_use", contexts=1)


def test_a_context_holds_the_last_turns():
    environment = environments.make("recent", environment="treasure", options={"size": 2, "brief": True}, turns=2, contexts=4)
    inner = environments.make("treasure", size=2, brief=True)
    problem = environment.task.train[5]
    state, opening = base.begin(environment, problem, 0)
    alone, same = base.begin(inner, problem, 0)
    assert opening.messages == same.messages and environment.contexts == 4
    messages = ["go up", "take key", "go north", "dance"]
    turns, read = say(environment, state, *messages), [turn.messages[0]["content"] for turn in say(inner, alone, *messages)]
    assert [turn.fresh for turn in turns] == [True, True, True, False] and [turn.done for turn in turns] == [False] * 3 + [True]
    assert [turn.messages[0]["content"] for turn in turns[:3]] == [
        f"> go up\n{read[0]}", f"> go up\n{read[0]}\n> take key\n{read[1]}", f"> take key\n{read[1]}\n> go north\n{read[2]}"]
    assert turns[3].messages == []  # the last context has no other behind it
    for _ in range(3):  # an oracle that needs no history wins by it
        state, _ = base.begin(long := environments.make("recent", options={"size": 2}, contexts=16), problem, 0)
        while not (turn := base.advance(long, state, {"role": "assistant", "content": long.oracle(state)})).done:
            pass
        assert turn.reward == 1
    with pytest.raises(ValueError, match="begins new contexts itself"):
        environments.make("recent", environment="memory_use")
    with pytest.raises(ValueError, match="turns=0"):
        environments.make("recent", turns=0)


def test_a_call_that_quotes_the_end_of_a_thought_stays_whole_in_later_contexts():
    environment = environments.make("recent", options={"size": 2, "brief": True}, thoughts=False)
    state, _ = base.begin(environment, environment.task.train[5], 0)
    (turn,) = say(environment, state, '<think>a</think>\nsay(text="</think>")')
    assert turn.messages[0]["content"].startswith('> say(text="</think>")\n')


def test_earlier_turns_without_their_thoughts():
    """The environment reads all of a message; contexts hold what comes after the thought, and one that was not ended stays."""
    said = ["<think>\ngo south?\n</think>\n\ngo north", "<think>a</think>take<think>b</think> key", "<think>\nhm", "go east"]
    texts = {}
    for thoughts in (True, False):
        environment = environments.make("recent", options={"size": 2, "brief": True}, turns=3, contexts=5, thoughts=thoughts)
        turns = say(environment, base.begin(environment, environment.task.train[5], 0)[0], *said)
        assert [turn.info["action"] for turn in turns] == ["go north", "", "", "go east"]
        texts[thoughts] = [turn.messages[0]["content"] for turn in turns]
    own = [[line[2:] for line in text.splitlines() if line.startswith("> ")] for text in texts[False]]
    assert own == [["go north"], ["go north", " key"], ["go north", " key", "<think>"], [" key", "<think>", "go east"]]
    assert "go south?" in texts[True][0] and "a</think>take" in texts[True][1] and "a</think>" not in texts[False][1]
    assert texts[False][0] == texts[True][0].replace("<think>\ngo south?\n</think>\n\n", "")


@linux
def test_skills_of_the_first_task_serve_the_second():
    environment = environments.make("skill_chain", size=20, heldout=5)
    problem = environment.task.train[3]
    word, law, (first, second) = (problem.extra[name] for name in ("word", "law", "answers"))
    call = problem.extra["calls"][1]
    define = f"```python\ndef {word}(x):\n    return {law}\n{{}}\n```"
    assert eval(call, {word: lambda x: eval(law, {"x": x})}) == int(second)

    def play(*texts):
        state, opening = base.begin(environment, problem, 0)
        return say(environment, state, *texts)

    turns = play(define.format("print(1)"), first, f"```python\nprint({call})\n```", second)
    assert [turn.info["agent"] for turn in turns] == [0, 0, 1, 1] and [turn.reward for turn in turns] == [0, 0.5, 0, 0.5]
    assert turns[0].messages[0]["content"] == "1" and turns[2].messages[0]["content"] == second
    assert turns[1].messages[0]["content"].startswith(f"Functions that you can call:\ndef {word}(x):\n    return {law}\n")
    assert turns[3].info["returns"] == [2, 2] and turns[3].info["skill_used"] == 1 and turns[3].done
    own = play(define.format("print(1)"), first, define.format(f"print({call})"), second)[-1]  # defined again: not used
    assert own.info["returns"] == [1, 1] and own.info["skill_used"] == 0
    wrong = play(define.format(""), "0", f"```python\nprint({call})\n```", second)[-1]
    assert wrong.info["returns"] == [0, 2]  # the writer did not solve its own task
    lost = play(define.format(""), first, f"```python\nprint({call})\n```", "0")[-1]
    assert lost.info["returns"] == [1, 0] and lost.info["skill_used"] == 1
    missing = play(first, f"```python\nprint({call})\n```")[-1]
    assert "NameError" in missing.messages[0]["content"]
    assert play(*["```python\n1\n```"] * 4)[-1].messages[0]["content"].startswith("Functions that you can call:\nnone")
    assert uses(["f(1)\ng(2)\ndef g(x): pass"], {"g": ""}) is False and uses(["f(1)\ng(2)"], {"g": ""}) is True
    assert skills("def f(:") == skills("(" * 500) == skills("\0") == {} and uses(["def f(:"], {"f": ""}) is False
    with pytest.raises(ValueError, match="turns=1"):
        environments.make("skill_chain", turns=1)


@pytest.mark.slow
@pytest.mark.parametrize("name, options", [
    pytest.param("skill_chain", {"size": 20}, marks=linux), ("tic_tac_toe", {}), ("solver_verifier", {}), ("memory_use", {}),
    ("recent", {"options": {"size": 2}, "contexts": 20})], ids=lambda x: x if isinstance(x, str) else "")
def test_audit(name, options):
    rows, checks = audit.audit(*(environments.make(name, **options) for _ in range(2)), count=12, seed=0)
    assert not any(check.failed for check in checks.values()), checks
