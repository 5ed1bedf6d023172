"""The moving average of the weights: its equation, resume bit for bit, and its readers."""
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import run_files

from jaxrl_llm.models import weights
from jaxrl_llm.parallel.rules import path_name, spec_of
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.runs import loop, trained
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config

ROOT = Path(__file__).parents[2]


def tiny(**changes):
    c = default_config()
    c.update_from_flattened_dict({
        "task": "arithmetic(level=digit)", "rewards": "format(pattern='(?s).*[a-z].*')", "steps": 3,
        "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_size": 16, "prompts.per_step": 2,
        "sampling.group": 4, "sampling.max_tokens": 6, "optimizer.learning_rate": 3e-2, "optimizer.warmup_updates": 0,
        "optimizer.ema": 0.75, "eval.every": 0, "eval.problems": 2, "checkpoint.every": 1, "checkpoint.keep": 9,
        "checkpoint.best": "eval/score", **changes})
    return c


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of three steps of one update each."""
    workdir = tmp_path_factory.mktemp("averaged")
    loop.train(tiny(), workdir)
    return workdir


def test_it_is_the_decayed_sum_of_the_weights_after_each_update(averaged):
    """1/4 (w3 + 3/4 w2 + 9/16 w1) + 27/64 w0."""
    states = [run_files.saved(averaged, tiny(), step) for step in range(4)]
    names = [name for name in states[0] if name.startswith(".params")]
    assert len(names) > 5
    for name in names:
        w = [state[name].astype(np.float64) for state in states]
        wanted = (w[3] + 0.75 * w[2] + 0.5625 * w[1]) / 4 + 27 / 64 * w[0]
        np.testing.assert_allclose(states[3][name.replace(".params", ".average")], wanted, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(states[0][name.replace(".params", ".average")], states[0][name])
    assert np.abs(states[3][".average['embed']"] - states[3][".params['embed']"]).max() > 1e-3


@pytest.mark.slow
def test_a_resumed_run_has_the_same_average(averaged, tmp_path):
    loop.train(tiny(steps=1), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 1 -> 3"):
        loop.train(tiny(), tmp_path, resume=True)
    run_files.assert_same(run_files.saved(tmp_path, tiny()), run_files.saved(averaged, tiny()))


@pytest.mark.slow
def test_it_is_measured_and_exported(averaged, tmp_path):
    state = run_files.saved(averaged, tiny())
    np.testing.assert_array_equal(trained.trained(averaged, average=True).params["embed"], state[".average['embed']"])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for script, options in (("export", (f"--out={tmp_path / 'model'}",)), ("evaluate", ("--problems=2",))):
        done = subprocess.run([sys.executable, f"experiments/{script}.py", f"--workdir={averaged}", "--average", *options],
                              cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_array_equal(weights.load(tmp_path / "model")[1]["embed"], state[".average['embed']"])
    facts = json.loads((averaged / "evaluation_step3_average_temperature1_seed0/evaluation.json").read_text())
    assert facts["average"] and facts["step"] == 3


@pytest.mark.slow
def test_of_adapters_it_is_adapters(averaged, tmp_path):
    loop.train(tiny(**{"lora.rank": 2, "steps": 1}), tmp_path)
    first, last = (run_files.saved(tmp_path, tiny(**{"lora.rank": 2, "steps": 1}), step) for step in (0, 1))
    result = trained.trained(tmp_path, average=True)
    for side in ("a", "b"):
        wanted = 0.75 * first[f".lora['q']['{side}']"] + 0.25 * last[f".lora['q']['{side}']"]
        np.testing.assert_allclose(result.lora["q"][side], wanted, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(result.params["embed"], first[".params['embed']"])


def test_what_has_no_average_is_refused(averaged, tmp_path):
    with pytest.raises(ValueError, match="has no moving average of its best weights: averages lie in the checkpoints"):
        trained.trained(averaged, average=True, best=True)
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 1, "config": tiny(**{"optimizer.ema": 0.0}).to_dict()}))
    with pytest.raises(ValueError, match="has no moving average of its weights: .* --config.optimizer.ema=0.99"):
        trained.trained(tmp_path, average=True)
    for decay in (1.0, -0.1):
        with pytest.raises(ValueError, match=f"config.optimizer.ema is {decay}; give a decay below 1"):
            setup.build(tiny(**{"optimizer.ema": decay}))


def test_it_lies_as_the_weights_and_is_planned(averaged):
    run, params = setup.build(tiny())
    state, mesh = setup.initial_state(run, params), {"data": 2, "fsdp": 4, "tensor": 2}
    laid = {path_name(path): spec_of(path_name(path), x.shape, mesh) for path, x in jax.tree.leaves_with_path(state)}
    own = {name: spec for name, spec in laid.items() if name.startswith("average/")}
    assert len(own) > 5 and all(spec == laid[name.replace("average/", "params/")] for name, spec in own.items())
    assert any(tuple(spec) for spec in own.values())
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    without, kept = (plan.kept_memory(MODELS["smollm2_135m"], plan.Work(2, 2, 8, 8, average=average), one)
                     for average in (False, True))
    assert kept == without | {"average": without["weights"]}
    adapters = plan.kept_memory(MODELS["smollm2_135m"], plan.Work(2, 2, 8, 8, lora_rank=4, average=True), one)["average"]
    assert adapters == 4 * plan.adapter_weights(MODELS["smollm2_135m"], 4)
