"""The cost of runs: tokens with filters, seconds without the compiler, operations against a count by hand."""
import json

import numpy as np
import pytest
from run_folders import base, write_run

from jaxrl_llm.compare import ledger, plan
from jaxrl_llm.evaluation import flops
from jaxrl_llm.setup.resolve import resolve

BUDGET = plan.Budget("steps", 4)


def job_of(tmp_path, text, **changes):
    return plan.jobs_of(plan.read_entries(text, base(**changes)), [0], BUDGET, tmp_path)[0]


def costs(text, prompt=5.0, **changes):  # digit + digit = takes five tokens
    config = plan.read_entries(text, base(**changes))[0].config
    return ledger.costs_of(resolve(config, plan.methods.get(config.method).defaults), prompt)


def test_tokens_seconds_and_steps(tmp_path):
    job = job_of(tmp_path, "grpo")
    write_run(job, BUDGET, [0.1, 0.2, 0.4])
    run = ledger.read_run(job.folder)
    np.testing.assert_array_equal(run.spent["steps"], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(run.spent["tokens"], [0, 40, 80, 120, 160])  # 4 prompts x 2 completions x 5 tokens
    np.testing.assert_array_equal(run.spent["seconds"], [0, 2, 4, 6, 8])  # the first took 100 s in the compiler
    assert run.evaluated("tokens") == 160


def test_a_line_without_measurements_hides_no_budget(tmp_path):
    job = job_of(tmp_path, "grpo")
    write_run(job, BUDGET, [0.1, 0.2, 0.4])
    path = job.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2] = {name: value for name, value in lines[2].items() if name in ("step", "eval/score")}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ledger.read_run(job.folder)
    np.testing.assert_array_equal(run.spent["tokens"], [0, 40, 40, 80, 120])
    assert all(np.isfinite(spent).all() for spent in run.spent.values()) and run.evaluated("tokens") == 120


def test_tokens_of_others_cost_operations_and_are_not_sampled(tmp_path):
    job = job_of(tmp_path, "grpo")
    write_run(job, BUDGET, [0.1, 0.2], more={"completion/tokens": 40.0, "completion/present": 9.0})
    run = ledger.read_run(job.folder)
    np.testing.assert_array_equal(run.spent["tokens"], [0, 40, 80])
    step = costs("grpo").step_flops(np.array([9.0]), np.ones(1), np.ones(1))[0]
    np.testing.assert_allclose(run.spent["flops"], [0, step, 2 * step], rtol=1e-12)


def test_prompts_cost_what_they_were_measured_to_have(tmp_path):
    """An environment's prompts are not those of `config.task`; a run that did not measure any has those of its task."""
    job = job_of(tmp_path, "grpo")
    write_run(job, BUDGET, [0.1, 0.2])
    def step(prompt):
        return costs("grpo", prompt).step_flops(np.array([5.0]), np.ones(1), np.ones(1))[0]
    np.testing.assert_allclose(ledger.read_run(job.folder).spent["flops"], [0, step(5), 2 * step(5)], rtol=1e-12)
    path, lengths = job.folder / "metrics.jsonl", {1: {"prompt/length": 39.0}, 2: {"prompt/length": 41.0}}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | lengths.get(line["step"], {})) + "\n" for line in lines))
    np.testing.assert_allclose(ledger.read_run(job.folder).spent["flops"], [0, step(40), 2 * step(40)], rtol=1e-12)
    assert step(40) > 2 * step(5)


def test_filtered_rollouts_count_as_cost(tmp_path):
    job = job_of(tmp_path, "dapo")
    write_run(job, BUDGET, [0.1, 0.2], draws=3.0)
    run = ledger.read_run(job.folder)
    np.testing.assert_array_equal(run.spent["tokens"], [0, 120, 240])
    once, thrice = costs("dapo").step_flops(np.array([5.0, 5.0]), np.array([1.0, 3.0]), np.ones(2))
    sampling = costs("dapo(learner.epochs=1)")
    rollouts = 4 * (flops.prefill_flops(sampling.model, [round(sampling.prompt)])
                    + 2 * flops.decode_flops(sampling.model, round(sampling.prompt), 5))
    assert thrice - once == 2 * rollouts


def test_operations_of_a_step_by_hand():
    result = costs("rloo")
    model, prompt = result.model, round(result.prompt)
    assert (model.hidden_size, model.num_layers, result.prompts, result.group) == (16, 1, 4, 2)
    group = flops.packed_flops(model, prompt, [5, 5])
    rollouts = flops.prefill_flops(model, [prompt]) + 2 * flops.decode_flops(model, prompt, 5)
    assert result.step_flops(np.array([5.0]), np.ones(1), np.ones(1))[0] == 4 * (rollouts + 3 * group)
    assert result.step_flops(np.array([5.0]), np.array([3.0]), np.array([0.5]))[0] == 4 * (3 * rollouts + 0.5 * 3 * group)
    between = result.step_flops(np.array([5.0, 5.25, 6.0]), np.ones(3), np.ones(3))
    assert between[1] == pytest.approx(0.75 * between[0] + 0.25 * between[2], rel=1e-12)
    assert costs("rloo(learner.epochs=2)").step_flops(np.array([5.0]), np.ones(1), np.ones(1))[0] == 4 * (rollouts + 7 * group)
    assert costs("grpo(objective='+ kl(0.1)')").passes == 1 + costs("grpo").passes
    assert (costs("poise").passes, costs("poise(learner.micro_batches=2)").passes) == (0, 1)


def test_a_critic_costs_as_much_as_a_policy_without_logits():
    plain, separate = costs("rloo"), costs("ppo(learner.minibatches=1, learner.epochs=1)")
    head = costs("ppo(learner.minibatches=1, learner.epochs=1, critic.kind=head)")
    assert (plain.critic, separate.critic, head.critic) == (0, 4, 2)
    states = flops.packed_flops(plain.model, round(plain.prompt), [5, 5]) - 2 * plain.model.vocab_size * 16 * 10
    def step(c):
        return c.step_flops(np.array([5.0]), np.ones(1), np.ones(1))[0]
    assert step(separate) - step(head) == 4 * 2 * states
    alone = costs("vc_ppo(learner.minibatches=1, learner.epochs=1, critic.pretrain_steps=1)")
    first, second = alone.step_flops(np.array([5.0, 5.0]), np.ones(2), np.ones(2))
    assert second - first == 4 * 3 * flops.packed_flops(plain.model, round(plain.prompt), [5, 5])


def test_a_run_that_has_not_begun(tmp_path):
    assert ledger.read_run(tmp_path / "nothing") is None
    job = job_of(tmp_path, "grpo")
    write_run(job, BUDGET, [0.1])
    run = ledger.read_run(job.folder)
    assert run.evaluated("flops") == 0 and run.spent["tokens"].tolist() == [0]
