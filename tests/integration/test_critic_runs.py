"""Runs with a critic: it trains alone first, then with the policy; a resume changes no bit of either."""
import numpy as np
import pytest
from run_files import assert_same, lines, repeatable
from test_train import run, saved

OPTIONS = {"method": "vc_ppo", "critic.pretrain_steps": 2, "learner.minibatches": 2, "checkpoint.every": 1,
           "checkpoint.keep": 9, "eval.every": 4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    run(workdir, **OPTIONS, steps=4)
    return workdir


def moved(result, wanted, part):
    names = [name for name in result if name.startswith(part)]
    assert names
    return any((result[name] != wanted[name]).any() for name in names)


@pytest.mark.slow
def test_the_critic_is_trained_alone_first(straight):
    states = {step: saved(straight, step, **OPTIONS, steps=4) for step in (0, 2, 3)}
    for part in (".params", ".opt_state"):
        assert not moved(states[2], states[0], part) and moved(states[3], states[2], part)
    for part in (".beside['critic'].params['trunk']", ".beside['critic'].params['head']"):
        assert moved(states[2], states[0], part) and moved(states[3], states[2], part)
    result = lines(straight)
    assert all(("loss" in line) == (line["step"] > 2) for line in result)
    for line in result[1:]:
        assert {"value/loss", "value/clip_fraction", "value/grad_norm", "value/explained_variance"} <= line.keys()
        assert line["value/return"] == pytest.approx(line["reward/mean"], abs=0.15) and line["value/skipped"] == 0
    assert result[1]["value/mean"] == 0 and abs(result[4]["value/mean"]) > 0.01
    assert [line["learning_rate"] for line in result[3:]] == pytest.approx([3e-3, 3e-3])  # two updates of warm-up in step 3
    np.testing.assert_equal(states[3][".beside['critic'].opt_state[0].count"], 6)
    np.testing.assert_equal(states[3][".opt_state[0].count"], 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:resuming")
def test_resuming_with_a_critic_changes_no_bit(straight, tmp_path):
    """This holds also if both optimisers keep their moments on the host after the resume."""
    run(tmp_path, **OPTIONS | {"eval.every": 1}, steps=3)
    run(tmp_path, True, **OPTIONS | {"learner.offload": "optimizer"}, steps=4)
    assert_same(saved(tmp_path, 4, **OPTIONS, steps=4), saved(straight, 4, **OPTIONS, steps=4))
    def train(line):
        return {name: x for name, x in repeatable(line).items() if not name.startswith("eval/")}
    assert [train(line) for line in lines(tmp_path)] == [train(line) for line in lines(straight)]


@pytest.mark.slow
def test_a_head_on_the_states_under_adapters(tmp_path):
    options = {"method": "ppo", "critic.kind": "head", "lora.rank": 2, "learner.minibatches": 1, "steps": 2, "eval.every": 2}
    run(tmp_path, **options)
    first, last = saved(tmp_path, 0, **options), saved(tmp_path, 2, **options)
    assert not moved(last, first, ".params") and moved(last, first, ".lora") and moved(last, first, ".beside['critic'].params")
    assert {name for name in last if name.startswith(".beside['critic'].params")} == {
        ".beside['critic'].params['head']['bias']", ".beside['critic'].params['head']['weight']"}
