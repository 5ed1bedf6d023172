"""Run folders with known numbers: filters, groups, notes on broken, partial or repeated runs."""
import json

import numpy as np
import pytest

from jaxrl_llm import diagnostics
from jaxrl_llm.diagnostics import open_rl_benchmark
from jaxrl_llm.diagnostics.base import strict
from jaxrl_llm.evaluation import scaling
from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.workdir import open_workdir


def write(path, scores, entropies=None, **settings):
    """A run that evaluates `scores` at steps 0, 2, 4, ..., each step 40 tokens."""
    config = default_config()
    config.prompts.per_step, config.sampling.group, config.steps = 4, 2, 2 * len(scores) - 2
    config.update_from_flattened_dict(settings)
    open_workdir(path, config).record()
    with MetricWriter(path) as writer:
        for step in range(2 * len(scores) - 1):
            line = {"eval/score": scores[step // 2]} if step % 2 == 0 else {}
            if entropies is not None and step % 2 == 0 and step:
                line["entropy"] = entropies[step // 2]
            writer.write(step, line | ({"completion/length": 5.0, "time/step": 1.0, "reward/mean": 0.1 * step} if step else {}))


@pytest.fixture
def runs(tmp_path):
    for method, top in (("grpo", 0.5), ("rloo", 0.3)):
        for seed in (0, 1):
            write(tmp_path / method / f"seed{seed}", [0.1, 0.2, top + 0.1 * seed], method=method, seed=seed)
    return tmp_path


def test_groups_curves_and_ends(runs):
    result = diagnostics.make("open_rl_benchmark", by=("method",)).measure([runs])
    assert list(result["groups"]) == ["grpo", "rloo"] and not result["notes"]
    grpo = result["groups"]["grpo"]
    assert grpo["mean"] == pytest.approx(0.55) and grpo["deviation"] == pytest.approx(0.05)
    x = np.array(grpo["x"])
    assert x[0] == 0 and x[-1] == 160
    np.testing.assert_allclose(np.interp([0, 40, 80, 160], x, grpo["curve"]), [0.1, 0.15, 0.2, 0.55], atol=2e-3)
    np.testing.assert_allclose(np.interp([80, 160], x, grpo["band"]), [0, 0.05], atol=2e-3)


def test_a_deleted_run_changes_its_own_cell_only(runs):
    before = diagnostics.make("open_rl_benchmark", by=("method",)).measure([runs])["groups"]
    (runs / "rloo/seed1/config.json").unlink()
    after = diagnostics.make("open_rl_benchmark", by=("method",)).measure([runs])
    assert after["groups"]["grpo"] == before["grpo"] and after["groups"]["rloo"]["mean"] == pytest.approx(0.3)
    assert after["notes"] == ["groups have different numbers of runs: grpo: 2, rloo: 1"]


def test_filters(runs):
    result = diagnostics.make("open_rl_benchmark", where=("method=grpo", "seed=1|7", "sampling.group=2.0")).measure([runs])
    (group,) = result["groups"].values()
    assert [run["seed"] for run in group["runs"]] == [1] and group["mean"] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="no run below .* 4 runs were read"):
        diagnostics.make("open_rl_benchmark", where=("method=ppo",)).measure([runs])
    with pytest.raises(ValueError, match="write key=value"):
        diagnostics.make("open_rl_benchmark", where=("grpo",))


def test_broken_and_partial_folders_are_named_and_left_out(runs):
    write(runs / "cut", [0.1, 0.2, 0.9], method="grpo", seed=2, steps=40)
    lines = (runs / "cut/metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "cut/metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:10])  # a kill in the middle of a line
    write(runs / "started", [0.1], method="grpo", seed=3, steps=40)
    for name, text in (("broken", "{"), ("foreign", "[1, 2]"), ("other", '{"lr": 1}')):
        (runs / name).mkdir()
        (runs / name / "config.json").write_text(text)
        (runs / name / "metrics.jsonl").write_text('{"step": 0}\n')
    (runs / "new").mkdir()
    (runs / "new/config.json").write_text("{}")
    result = diagnostics.make("open_rl_benchmark", by=("method",)).measure([runs])
    assert [len(one["runs"]) for one in result["groups"].values()] == [3, 2]
    notes = "\n".join(result["notes"])
    for words in ("broken/config.json is no JSON file", "foreign/config.json holds a list",
                  "other/config.json is no run configuration", "new: nothing measured yet",
                  "started: no eval/score after a step", "different numbers of runs", "cut: 3 of 40 steps"):
        assert words in notes, notes
    json.dumps(strict(result), allow_nan=False)


def test_a_repeated_seed_is_named(runs):
    write(runs / "again", [0.1, 0.2, 0.3], method="rloo", seed=1, **{"optimizer.learning_rate": 1e-3})
    notes = "\n".join(diagnostics.make("open_rl_benchmark", by=("method",)).measure([runs])["notes"])
    assert "rloo has a seed twice" in notes


def test_a_training_metric_with_a_window(runs):
    result = diagnostics.make("open_rl_benchmark", metric="reward/mean", unit="steps", window=2, last=2).measure([runs])
    (group, _) = result["groups"].values()
    assert group["mean"] == pytest.approx(0.35) and group["x"][-1] == 4
    assert group["curve"][-1] == pytest.approx(0.35)


def test_laws_of_recipes(tmp_path):
    """Three seeds whose score follows a sigmoid and, by its entropy, the entropy law; and a recipe that falls."""
    law = scaling.Sigmoid(0.1, 0.8, 1.5, 300)
    for name, sign in (("good", 1), ("bad", -1)):
        for seed in range(3):
            scores = law.predict(80 * np.arange(30.0))[::sign] + np.random.default_rng(seed).normal(0, 0.003, 30)
            entropies = np.log(np.maximum((0.9 - scores) / 0.2, 1e-3))  # R = 0.9 - 0.2 exp(H)
            write(tmp_path / name / f"seed{seed}", scores.tolist(), entropies.tolist(), seed=seed)
    folders = [tmp_path / "good", tmp_path / "bad"]
    fits = diagnostics.make("scalerl_fit", unit="tokens", resamples=20)
    result = json.loads(json.dumps(strict(fits.measure(folders)), allow_nan=False))
    good, bad = result["recipes"].values()
    low, high = good["sigmoid"]["intervals"]["ceiling"]
    assert good["runs"] == 3 and low - 0.02 <= 0.8 <= high + 0.02
    assert good["extrapolation"]["sigmoid"] < good["extrapolation"]["logarithm"] and "does not rise" in bad["problem"]
    (rows,) = result["tables"].values()
    assert rows[0]["runs"] == 3 and "does not rise" in rows[1]["ceiling A"] and rows[0].keys() == rows[1].keys()
    assert fits.figure(result, tmp_path / "scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    laws = diagnostics.make("entropy_law")
    result = json.loads(json.dumps(strict(laws.measure(folders)), allow_nan=False))
    fitted = result["recipes"]["good"]
    assert fitted["law"]["a"] == pytest.approx(0.2, abs=1e-6) and fitted["law"]["b"] == pytest.approx(0.9, abs=1e-6)
    assert fitted["early_rmse"] < 1e-6
    assert laws.figure(result, tmp_path / "entropy.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(FileNotFoundError, match="holds no run"):
        laws.measure([tmp_path])


def test_without_entropy_there_is_no_law(runs):
    result = diagnostics.make("entropy_law").measure([runs / "grpo"])
    (recipe,) = result["recipes"].values()
    assert "at least three points" in recipe["problem"] and "law" not in recipe


def test_names_options_and_errors():
    assert diagnostics.names() == ["alp", "echo_chamber", "entropy_law", "opd_alignment", "open_rl_benchmark", "policy_cliff",
                                   "predict_downstream", "scalerl_fit"]
    assert all(diagnostics.about(name).endswith(").") for name in diagnostics.names())
    with pytest.raises(ValueError, match="Did you mean 'alp'"):
        diagnostics.make("alpp")
    with pytest.raises(ValueError, match="needs the keyword 'formats'"):
        diagnostics.make("echo_chamber")
    with pytest.raises(ValueError, match="Did you mean 'problems'"):
        diagnostics.make("alp", problem=3)
    assert open_rl_benchmark.read_filter("a.b=1|2") == ("a.b", ("1", "2"))
