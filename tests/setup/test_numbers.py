"""Numbers of objectives by schedules: how they are written, and a run that follows one."""
import jax.numpy as jnp
import numpy as np
import pytest
import run_files

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.schedules import schedule
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import names, numbers, setup
from jaxrl_llm.setup.config import default_config


def tiny(**changes):
    c = default_config()
    c.update_from_flattened_dict({
        "task": "arithmetic(level=digit)", "rewards": "format(pattern='(?s).*[a-z].*')", "steps": 4,
        "model.hidden_size": 16, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_size": 16, "prompts.per_step": 2,
        "sampling.group": 4, "sampling.max_tokens": 6, "optimizer.learning_rate": 3e-2, "eval.every": 0, "eval.problems": 2,
        "learner.epochs": 2, "objective": "clip_high=0.3 + kl(linear(start=0.4, end=0))", "checkpoint.every": 1, **changes})
    return c


def test_schedules_by_name():
    result = [float(schedule("linear(start=0.4, end=0)", 4)(step)) for step in range(6)]
    np.testing.assert_allclose(result, [0.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-7)
    result = [float(schedule("cosine(start=0, end=1, steps=2)", 100)(step)) for step in range(4)]
    np.testing.assert_allclose(result, [0, 0.5, 1, 1], atol=1e-7)
    assert [float(schedule("after(0.5, 2)")(step)) for step in range(4)] == [0, 0, 0.5, 0.5]


def test_what_cannot_follow_a_schedule_is_refused_at_the_start():
    with pytest.raises(ValueError, match="dual_clip of this objective cannot follow a schedule"):
        setup.build(tiny(objective="dual_clip=linear(start=3, end=5)"))
    with pytest.raises(ValueError, match="keyword of objective 'ppo_clip' 'clip_hig'. Did you mean 'clip_high'"):
        setup.build(tiny(objective="clip_hig=linear(start=3, end=5)"))
    with pytest.raises(ValueError, match=r"has no kl_coef: .* or \"\+ kl\(0.1\)\" to add it to a method's"):
        setup.build(tiny(objective="kl_coef=0.1"))


@pytest.mark.slow
def test_a_run_follows_its_schedule_over_a_resume(tmp_path):
    loop.train(tiny(), tmp_path / "straight")
    lines = run_files.lines(tmp_path / "straight")
    np.testing.assert_allclose([line["objective/kl_coef"] for line in lines[1:]], [0.4, 0.3, 0.2, 0.1], rtol=1e-6)
    assert all("kl" in line for line in lines[1:])
    saved = run_files.saved(tmp_path / "straight", tiny())
    assert saved[".objective_state.updates"] == 4 * 2
    schedule = "clip_high=0.3 + kl(linear(0.4, 0, steps=4))"  # as the other, for any number of steps
    loop.train(tiny(objective=schedule, steps=2), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(tiny(objective=schedule), tmp_path / "broken", resume=True)
    run_files.assert_same(run_files.saved(tmp_path / "broken", tiny(objective=schedule)), saved)


def test_a_schedule_begins_when_the_policy_learns():
    """Of 6 steps the first 2 are a critic's alone; a method without one has all 6."""
    full = jnp.zeros((1, 2, 3))
    rollouts = Rollouts(mask=full == 0, valid=jnp.ones((1, 2), bool), rewards=jnp.array([[1.0, 0]]), old_logprobs=full,
                        ref_logprobs=full)
    for method, expected in (("vc_ppo", [0.4, 0.3, 0.2, 0.1, 0]), ("grpo", [2.4 / 6, 2 / 6, 1.6 / 6, 1.2 / 6, 0.8 / 6])):
        config = tiny(method=method, steps=6, **{"learner.epochs": 1, "learner.minibatches": 1, "critic.pretrain_steps": 2})
        _, objective = numbers.method_parts(config, names.method_of(config), 16)
        result = [objective.update(full, rollouts, full, objective.init()._replace(updates=jnp.int32(step)))[1][0]
                  for step in range(5)]
        np.testing.assert_allclose([metrics["objective/kl_coef"] for metrics in result], expected, atol=1e-6)
