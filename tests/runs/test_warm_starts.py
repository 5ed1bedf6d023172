"""Warm starts that runs share: the same bits as a new warm-up, a hash of what they depend on, and damage."""
import os

import chatter
import jax
import numpy as np
import pytest
import run_files

from jaxrl_llm.runs import beginning, loop, warm_starts
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.workdir import checkpoint_steps

WARMED = {"warmup.steps": 4, "warmup.batch": 4, "checkpoint.every": 1, "samples_every": 0}


def tiny(**changes):
    c = default_config()
    c.update_from_flattened_dict({
        "task": "arithmetic(level=digit)", "steps": 2, "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2,
        "model.mlp_size": 16, "prompts.per_step": 2, "sampling.group": 4, "sampling.max_tokens": 6, "eval.every": 0,
        "eval.problems": 2, **WARMED, **changes})
    return c


def played(**changes):
    """A run in an environment, whose oracle is imitated."""
    return chatter.get_config(**{"steps": 1, "eval.every": 0, "model.num_layers": 1, **WARMED, **changes})


class Silent:
    def __init__(self):
        self.said = []

    def phase(self, text, *parts):
        self.said.append(text)


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny, played])
def test_runs_of_two_methods_share_one_warm_up(config, tmp_path, capsys):
    """Every saved number of a run with a loaded warm start is that of a run with its own, of the first step and the last."""
    folder = tmp_path / "warm"
    for name, method, shared in (("first", "grpo", folder), ("loaded", "rloo", folder), ("own", "rloo", None)):
        loop.train(config(method=method), tmp_path / name, warm_starts=shared)
        said = capsys.readouterr().out
        assert ("loading the warm start" in said) == (name == "loaded")
        assert ("supervised warm-up 0/4" in said) == (name != "loaded")
    kept, = folder.iterdir()
    assert len(kept.name) == 24
    run_files.assert_same(*(run_files.saved(tmp_path / name, config(method="rloo")) for name in ("loaded", "own")))
    lines = [[run_files.repeatable(line) for line in run_files.lines(tmp_path / name)] for name in ("loaded", "own")]
    assert lines[0] == lines[1] and len(lines[0]) >= 2
    assert checkpoint_steps(tmp_path / "loaded/checkpoints") == checkpoint_steps(tmp_path / "own/checkpoints")


@pytest.mark.slow
def test_what_is_damaged_is_made_anew(tmp_path):
    run, params = setup.build(tiny())
    progress = Silent()
    made = jax.device_get(beginning.warm_up(run, params, progress, tmp_path))
    place, = tmp_path.iterdir()
    for file in [file for file in place.rglob("*") if file.is_file() and file.parent.name == "d"]:
        os.truncate(file, file.stat().st_size // 2)
    run, params = setup.build(tiny())
    with pytest.warns(RuntimeWarning, match="cannot be read .*: it is made anew"):
        again = beginning.warm_up(run, params, progress, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, made, jax.device_get(again))
    assert [*tmp_path.iterdir()] == [place]
    run, params = setup.build(tiny())
    begun = len(progress.said)
    jax.tree.map(np.testing.assert_array_equal, made, jax.device_get(beginning.warm_up(run, params, progress, tmp_path)))
    assert progress.said[begun:] == [f"loading the warm start {place}"]


def key_of(config):
    run, params = setup.build(config)
    return warm_starts.key_of(run, params)


@pytest.mark.slow
def test_the_key_covers_what_the_weights_depend_on_and_nothing_else():
    first = key_of(tiny())
    same = ({"method": "rloo"}, {"optimizer.learning_rate": 1e-2}, {"steps": 7}, {"sampling.group": 2}, {"prompts.per_step": 4},
            {"eval.every": 3}, {"method": "ppo"}, {"rewards": "format(pattern='a')"})
    other = ({"seed": 1}, {"warmup.steps": 5}, {"warmup.loss": 1.0}, {"warmup.learning_rate": 1e-2}, {"warmup.batch": 2},
             {"task": "arithmetic(level=digit, heldout_fraction=0.3)"}, {"model.mlp_size": 32}, {"sampling.max_tokens": 7},
             {"prompts.max_tokens": 16}, {"sampling.temperature": 0.7}, {"model.dtype": "bfloat16"})
    assert {key_of(tiny(**changes)) for changes in same} == {first}
    found = [key_of(tiny(**changes)) for changes in other]
    assert len({first, *found}) == 1 + len(other)
    turns = [key_of(played(**changes)) for changes in ({}, {"method": "gigpo"}, {"sampling.max_turns": 2},
                                                       {"environment": "chatter:letters(broken=0)"})]
    assert turns[0] == turns[1] and len({*turns}) == 3
