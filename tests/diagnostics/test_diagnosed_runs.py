"""Diagnostics of a real run of a tiny policy by the command: numbers in their ranges, figures, files, errors."""
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm import diagnostics
from jaxrl_llm.configs import arithmetic
from jaxrl_llm.diagnostics import opd_alignment, rows
from jaxrl_llm.diagnostics.alp import with_noise
from jaxrl_llm.runs import loop
from jaxrl_llm.runs.trained import trained

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"
FORMATS = (r"plain=\d+", r"worked=\d( \d)* \d+")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Five checkpoints of a policy of width 32, trained on sums of one digit in two styles."""
    workdir = tmp_path_factory.mktemp("diagnosed") / "run"
    c = arithmetic.get_config()
    c.task, c.method = "styles(level=digit)", "rloo"
    c.model.hidden_size, c.model.num_heads, c.model.mlp_size = 32, 4, 48
    c.warmup.steps, c.warmup.batch, c.warmup.loss, c.warmup.learning_rate = 200, 32, 0.0, 1e-2
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 5, 8, 8, 8
    c.eval.problems, c.eval.every, c.samples_every, c.checkpoint.every, c.checkpoint.keep = 16, 1, 0, 1, 10
    loop.train(c, workdir)
    return workdir


def measured(name, folders, tmp_path, **options):
    chosen = diagnostics.make(name, **options)
    result = chosen.measure(folders)
    assert chosen.figure(result, tmp_path / "figure.png").read_bytes()[:8] == PNG
    assert result["tables"] and all(rows and all(row.keys() == rows[0].keys() for row in rows)
                                    for rows in result["tables"].values())
    return result


def test_plain_rows_have_the_log_probs_of_the_policy(run):
    policy = trained(run)
    _, rollouts = rows.sampled(policy, 16, seed=0)
    result, _ = jax.jit(lambda p: rows.logprobs(policy.policy, p, None, rows.plain(rollouts)))(policy.params)
    wanted, _ = policy.policy.logprobs(policy.params, None, rollouts)
    mask = np.asarray(rollouts.mask)
    np.testing.assert_allclose(np.asarray(result).reshape(mask.shape)[mask], np.asarray(wanted)[mask], atol=2e-4)
    np.testing.assert_allclose(np.asarray(wanted)[mask], np.asarray(rollouts.behavior_logprobs)[mask], atol=2e-4)
    chances = rows.distributions(policy.policy, policy.params, None, rows.plain(rollouts))
    np.testing.assert_allclose(np.asarray(chances.sum(-1)), 1, atol=1e-5)
    chosen = np.take_along_axis(np.asarray(chances), np.asarray(rollouts.tokens).reshape(-1, mask.shape[2])[..., None], axis=-1)
    np.testing.assert_allclose(np.log(chosen[..., 0]).reshape(mask.shape)[mask], np.asarray(wanted)[mask], atol=2e-4)


def test_policy_cliff(run, tmp_path):
    result = measured("policy_cliff", [run], tmp_path, problems=16, formats=FORMATS)
    assert result["names"] == ["plain", "worked", "other"] and 0 < result["facts"]["classes tied"] <= 1
    for curve in result["curves"]:
        assert all(0 <= x <= bound + 1e-12 for x, bound in zip(curve["soft"], curve["bounds"]))
    chosen = {what: np.array(share) for what, share in result["chosen"].items()}
    assert all(share.sum() == pytest.approx(1) for share in chosen.values())
    longer, shorter = chosen["longer pays 0.001"], chosen["shorter pays 0.001"]
    assert longer[1] > shorter[1]  # worked answers are longer
    np.testing.assert_allclose(longer, chosen["longer pays 0.1"], atol=0.2)


def test_echo_chamber(run, tmp_path):
    result = measured("echo_chamber", [run], tmp_path, formats=FORMATS)
    (steps,) = result["runs"].values()
    assert [one["step"] for one in steps] == [0, 1, 2, 3, 4, 5]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for one, line in zip(steps, lines):
        assert sum(one["shares"]) == pytest.approx(1) and one["pass_at_1"] == pytest.approx(line["eval/solved"])
        assert one["pass_at_1"] <= one["pass_at_group"] == pytest.approx(line["eval/pass_at_group"])
        right = sum(s * a for s, a in zip(one["shares"], one["accuracy"]) if s)
        assert right == pytest.approx(one["pass_at_1"])


def test_alp(run, tmp_path):
    result = measured("alp", [run], tmp_path, problems=8, scales=(1e-4, 0.5))
    assert result["layers"] == ["0", "1", "all"] and len(result["rms"]) == 2 and min(result["rms"]) > 0
    for layer in result["layers"]:
        small, large = result["numbers"][layer]
        assert 0 <= small["kl"] < 1e-5 < large["kl"] and small["sequence ratio, high"] == pytest.approx(1, abs=0.02)
        assert large["sequence ratio, low"] < 0.9
        assert result["scores"][layer][0] == pytest.approx(result["score"], abs=0.05)
    policy = trained(run)
    noisy = with_noise(policy.params, "1", 0.1, jax.random.key(0))
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).reshape(len(a), -1).max(1) > 0, noisy["layers"],
                         policy.params["layers"])
    kernels = {path[0].key: leaf for path, leaf in jax.tree.leaves_with_path(moved)}
    assert kernels["q"].tolist() == [False, True] and kernels["mlp_norm"].tolist() == [False, False]


def test_opd_alignment(run, tmp_path):
    result = measured("opd_alignment", [run], tmp_path, problems=6, positions=2, tokens=2, samples=4)
    assert "step 0" in result["student"] and "step 5" in result["teacher"]
    assert len(result["nodes"]) >= 6
    for one in result["nodes"]:
        assert all(-1 <= one[loss] <= 1 for loss in ("forward_kl", "reverse_kl", "jsd")) and 0 <= one["success"] <= 1
        assert 0 < one["overlap"] <= 1 + 1e-6
    same = diagnostics.make("opd_alignment", problems=4, positions=2, tokens=2, samples=2).measure([run, run])
    assert all(one["overlap"] == pytest.approx(1, abs=1e-5) and abs(one["teacher advantage"]) < 1e-6 for one in same["nodes"])


def test_success_after_a_forced_token_is_that_of_the_whole_answer(run):
    """At the last digit a right digit means success whenever the end follows, and a forced end needs no sample."""
    student = trained(run)
    problem = next(p for p in student.source.task.heldout if len(p.answer) == 2)
    tokenizer = student.source.stream.tokenizer
    prompt = tokenizer.encode(problem.prompt)
    prefix, eos = tokenizer.encode(problem.answer[:1]), tokenizer.eos_id
    chances = np.full(student.policy.model.config.vocab_size, 1e-9)
    wrong = str((int(problem.answer[1]) + 1) % 10)
    chances[[tokenizer.encode(wrong)[0], eos]] = 0.4
    node = opd_alignment.PrefixNode(problem, prompt, prefix, True, chances, chances)
    forced, rate = opd_alignment.success(student, node, 2, 4, seed=0)
    assert eos in forced and rate[forced == eos] == 0  # one digit of two
    whole = opd_alignment.PrefixNode(problem, prompt, tokenizer.encode(problem.answer), True, chances, chances)
    forced, rate = opd_alignment.success(student, whole, 2, 4, seed=0)
    assert rate[forced == eos] == 1


def test_predict_downstream(run, tmp_path):
    result = measured("predict_downstream", [run], tmp_path, unit="steps", problems=16)
    assert result["steps"] == [1, 2, 3, 4, 5] == result["compute"] and result["facts"]["checkpoints"] == 5
    assert all(len(stage["mean"]) == 5 for stage in result["stages"].values())
    with pytest.raises(ValueError, match="Did you mean 'tokens'"):
        diagnostics.make("predict_downstream", unit="token")


def test_the_command_writes_numbers_and_a_figure(run, tmp_path):
    def command(*arguments):
        cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
        return subprocess.run([sys.executable, str(ROOT / "experiments/diagnose.py"), cache, *arguments], capture_output=True,
                              text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
    done = command("open_rl_benchmark(unit=steps)", str(run), f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "results.json").read_text())["unit"] == "steps" and "eval/score" in done.stdout
    assert (tmp_path / "open_rl_benchmark.png").read_bytes()[:8] == PNG
    failed = command("alp", str(run), str(run / "absent"))
    assert failed.returncode == 1 and "no folder" in failed.stderr and "Traceback" not in failed.stderr, failed.stderr
    unnamed = command(str(run))
    assert unnamed.returncode == 1 and f"given: {run}; diagnostics are" in unnamed.stderr and "policy_cliff" in unnamed.stderr
    with pytest.raises(ValueError, match="measures one run; 2 folders"):
        diagnostics.make("alp").measure([run, run])
