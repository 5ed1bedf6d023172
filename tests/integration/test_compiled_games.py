"""Runs in games of arrays: the trainer hears the same from one program as from threads, learns, and resumes bit for bit."""
import chatter
import pytest
import run_files

from jaxrl_llm.environments.compiled import Compiled
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.training import loop, setup

pytest.importorskip("pgx")
GAME = {"environment": "pgx_game(brief=True)", "sampling.max_tokens": 64, "sampling.turn_tokens": 2, "sampling.max_turns": 4,
        "warmup.steps": 60, "warmup.batch": 8, "warmup.learning_rate": 3e-3}
SELFPLAY = {**GAME, "environment": "pgx_game(brief=True, selfplay=True)", "method": "spiral"}


def test_three_steps_of_learning(tmp_path):
    loop.train(chatter.get_config(**GAME), tmp_path)
    lines = run_files.lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["skipped_updates"] == 0 and line["max/mismatch"] < 1e-4 and line["environment/invalid"] == 0
        assert 1 <= line["environment/turns"] <= 4 and -1 <= line["reward/mean"] <= 1
    assert sum(line["grad_norm"] for line in lines[1:]) > 0


@pytest.mark.slow
def test_threads_are_the_same_run(tmp_path, monkeypatch):
    assert setup.make_runner(chatter.get_config(**GAME))._pool.__class__ is Compiled, "since it is a game of arrays"
    loop.train(chatter.get_config(**GAME), tmp_path / "compiled")
    threaded = Runner("pgx_game", {"brief": True}, seed=chatter.get_config().seed, kind="threads")
    monkeypatch.setattr(setup, "make_runner", lambda config: threaded)
    loop.train(chatter.get_config(**GAME), tmp_path / "threads")
    run_files.assert_same(*(run_files.saved(tmp_path / kind, chatter.get_config(**GAME)) for kind in ("compiled", "threads")))
    compiled, threads = (run_files.lines(tmp_path / kind) for kind in ("compiled", "threads"))
    assert [line["reward/mean"] for line in compiled[1:]] == [line["reward/mean"] for line in threads[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [GAME, SELFPLAY], ids=["grpo", "spiral"])
def test_a_resumed_run_is_the_same_run(changes, tmp_path):
    straight, twice = tmp_path / "straight", tmp_path / "twice"
    loop.train(chatter.get_config(**changes), straight)
    loop.train(chatter.get_config(**changes, steps=2), twice)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(chatter.get_config(**changes), twice, resume=True)
    run_files.assert_same(*(run_files.saved(one, chatter.get_config(**changes)) for one in (twice, straight)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gymnax_game(brief=True, settings={'is_slippery': False})",
                                  "jumanji_game(brief=True, size=3)"])
def test_other_packages_and_oracles(name, tmp_path):
    pytest.importorskip(name.split("_")[0])
    changes = {**GAME, "environment": name, "warmup.steps": 2, "warmup.batch": 4, "sampling.turn_tokens": 8,
               "prompts.max_tokens": 40, "sampling.max_tokens": 200}
    loop.train(chatter.get_config(**changes), tmp_path)
    assert run_files.lines(tmp_path)[-1]["step"] == 3
