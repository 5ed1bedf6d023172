"""Runs in games of arrays: one program gives the trainer the same as threads; runs learn, and resume bit for bit."""
import chatter
import pytest
import run_files

from jaxrl_llm.environments.compiled import Compiled
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import judge

GAME = {"environment": "chatter:alphabet"}
SHORT = {"sampling.max_tokens": 64, "sampling.turn_tokens": 2, "sampling.max_turns": 4}
LAKE = {"environment": "gymnax_game(brief=True, settings={'is_slippery': False})", "sampling.max_turns": 4,
        "sampling.max_tokens": 200, "sampling.turn_tokens": 8, "prompts.max_tokens": 40, "warmup.steps": 2, "warmup.batch": 4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    loop.train(chatter.get_config(**GAME), workdir)
    return workdir


@pytest.mark.slow
def test_three_steps_of_learning(straight):
    assert judge.make_runner(chatter.get_config(**GAME))._pool.__class__ is Compiled, "since it is a game of arrays"
    lines = run_files.lines(straight)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["skipped_updates"] == 0 and line["max/mismatch"] < 1e-4 and line["environment/invalid"] == 0
        assert line["environment/turns"] == 3 and 0 < line["reward/mean"] < 0.75 and line["grad_norm"] > 0


@pytest.mark.slow
def test_threads_are_the_same_run(straight, tmp_path, monkeypatch):
    config = chatter.get_config(**GAME)
    monkeypatch.setattr(judge, "make_runner", lambda config: Runner("chatter:alphabet", seed=config.seed, kind="threads"))
    loop.train(config, tmp_path)
    run_files.assert_same(*(run_files.saved(one, chatter.get_config(**GAME)) for one in (straight, tmp_path)))


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    loop.train(chatter.get_config(**GAME, steps=2), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(chatter.get_config(**GAME), tmp_path, resume=True)
    run_files.assert_same(*(run_files.saved(one, chatter.get_config(**GAME)) for one in (straight, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("package, changes", [
    ("pgx", {**SHORT, "environment": "pgx_game(brief=True, selfplay=True)", "method": "spiral"}), ("gymnax", LAKE),
    ("jumanji", {**LAKE, "environment": "jumanji_game(brief=True, size=3)"})])
def test_games_of_packages(package, changes, tmp_path):
    """Self-play, and warm-ups by oracles."""
    pytest.importorskip(package, reason=f"games of {package} are in an extra")
    loop.train(chatter.get_config(**changes), tmp_path)
    assert run_files.lines(tmp_path)[-1]["step"] == 3
