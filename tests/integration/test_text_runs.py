"""Runs that learn from given texts: adapters in packed rows, resumed bit for bit, without a sampler, and before RL."""
import json
import shutil

import chatter
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({
        "steps": 3, "method": "sft", "rewards": "", "model.num_layers": 1, "eval.every": 0, "eval.problems": 0, "lora.rank": 2,
        "texts.heldout": 5, "checkpoint.every": 2, **changes})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "otr"])
def test_a_run_with_adapters_learns_and_resumes_bit_for_bit(method, tmp_path):
    assert loop.train(tiny(method=method), tmp_path / "straight") == {}
    lines = run_files.lines(tmp_path / "straight")
    assert all(np.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines[1:])
    assert "eval/score" not in lines[-1]
    if method == "sft":
        assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    elif method == "otr":  # new adapters change nothing, and three small steps change little
        assert lines[0]["eval/nll"] == pytest.approx(lines[1]["nll"], rel=0.05)
        assert lines[-1]["eval/loss"] != lines[0]["eval/loss"]
    else:  # new adapters change nothing, so that h is 0
        assert lines[0]["eval/loss"] == lines[1]["loss"] == pytest.approx(np.log(2), rel=1e-6)
        assert lines[-1]["preference/margin"] != 0 != lines[-1]["eval/preference/margin"]
    loop.train(tiny(method=method, steps=2), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(tiny(method=method), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, tiny(method=method)) for name in ("broken", "straight")))


@pytest.mark.slow
def test_supervised_learning_then_reinforcement_learning_in_phases(tmp_path):
    phases = "imitate(method=sft, steps=2), practise(method=grpo, steps=2)"
    evaluations = loop.train(tiny(phases=phases, steps=4, **{"lora.rank": 0, "eval.problems": 2}), tmp_path)
    lines = {line["step"]: line for line in run_files.lines(tmp_path)}
    assert "texts/trained" in lines[2] and "completion/tokens" in lines[3]
    assert "eval/loss" in lines[2] and "eval/score" in lines[2] and "after" in evaluations
    assert all(np.isfinite(lines[step]["loss"]) for step in (1, 2, 3, 4))


@pytest.mark.slow
def test_an_agent_imitates_texts_and_practises_and_resumes_bit_for_bit_in_either_phase(tmp_path):
    """Texts of two turns in a game of three; a checkpoint within each phase continues as the run went on."""
    said = [{"role": "user", "content": "Say 1."}, {"role": "assistant", "content": "a"},
            {"role": "user", "content": "Good."}, {"role": "assistant", "content": "b"}]
    (tmp_path / "texts.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 6)
    config = chatter.get_config(method="grpo", steps=4, phases="imitate(method=sft, steps=50%, where=texts.path), practise", **{
        "texts.path": str(tmp_path / "texts.jsonl"), "texts.heldout": 2, "checkpoint.every": 1, "checkpoint.keep": 9,
        "eval.every": 0, "eval.problems": 2, "samples_every": 0, "model.num_layers": 1})
    loop.train(config, tmp_path / "straight")
    lines = {line["step"]: line for line in run_files.lines(tmp_path / "straight")}
    assert lines[1]["texts/trained"] == lines[2]["texts/trained"] > 0 and lines[3]["completion/tokens"] > 0
    assert lines[2]["eval/loss"] < lines[0]["eval/loss"] and {"eval/score"} <= lines[2].keys() & lines[4].keys()
    for kept in (1, 3):
        broken = tmp_path / f"broken{kept}"
        shutil.copytree(tmp_path / "straight", broken)
        for step in range(kept + 1, 5):
            shutil.rmtree(broken / "checkpoints" / str(step))
        loop.train(config, broken, resume=True)
        run_files.assert_same(*(run_files.saved(folder, config) for folder in (broken, tmp_path / "straight")))
        again = {line["step"]: line for line in run_files.lines(broken)}
        assert [run_files.repeatable(again[step]) for step in lines] == [run_files.repeatable(lines[step]) for step in lines]


@pytest.mark.slow
def test_the_loss_of_held_out_texts_of_unequal_lengths_is_that_of_packed_rows(tmp_path):
    """Padded batches of short and of long texts have other shapes; the loss is of all texts together."""
    rows = [{"prompt": f"{n}+1=", "response": "x" * (3 if n < 20 else 60)} for n in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"texts.path": str(tmp_path / "texts.jsonl"), "texts.options": "chat=False", "texts.heldout": 20, "lora.rank": 0}
    found = []
    for pack in (False, True):
        run, params = setup.build(tiny(**options, **{"texts.pack": pack}))
        batches = run.source.held_out_texts(0)
        assert pack or len({batch.mask.shape for batch in batches}) == 2
        found.append(run.learner.loss(setup.initial_state(run, params), batches))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.slow
def test_right_completions_are_imitated(tmp_path):
    config = tiny(method="raft", steps=3, rewards="format(pattern='(?s).*[a-z].*')", **{"eval.problems": 2})
    loop.train(config, tmp_path)
    steps = [line for line in run_files.lines(tmp_path) if "loss" in line]
    assert len(steps) == 3 and all(np.isfinite(line["loss"]) for line in steps)
    assert all(line["trained/rollouts"] <= 4 for line in steps)


@pytest.mark.slow
def test_text_files_are_a_task_in_packed_rows(tmp_path):
    """Both kinds of segments are in a batch, and a run that ends before its last step resumes bit for bit."""
    (tmp_path / "book.txt").write_text("".join(f"word {number}. " for number in range(30)))

    def config(**changes):
        task = f"segments(path={str(tmp_path / 'book.txt')!r}, context=2, brief=True)"
        return tiny(method="rlpt", task=task, rewards="format(pattern='(?s).*[a-m].*')", **{
            "learner.packed_rows": 1, "texts.heldout": 0, **changes})

    loop.train(config(), tmp_path / "straight")
    steps = [line for line in run_files.lines(tmp_path / "straight") if "loss" in line]
    assert len(steps) == 3 and all(np.isfinite(line["loss"]) for line in steps)
    assert any(line["grad_norm"] > 0 for line in steps)
    loop.train(config(steps=2), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(config(), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config()) for name in ("broken", "straight")))
