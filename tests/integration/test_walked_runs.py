"""Runs of UI-S1: what rollouts have of walks, the advantages of their steps, learning in packed rows, and resume."""
import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import Role, from_lists
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup


def config(**changes):
    return chatter.get_config(method="ui_s1", environment="walked(environment='chatter:marked', patches=2)", **{
        "sampling.max_tokens": 64, "filters": "", **changes})


@pytest.fixture(scope="module")
def walked():
    run, params = setup.build(config())
    state = setup.initial_state(run, params)
    return run, run.source.next(run.learner.publish(state))


def steps_of(rollouts):
    """`(prompt, row, place, trajectory, step, match, reward)` of each turn, as the view has them."""
    extras, found = rollouts.extras, []
    for p, g, k in np.argwhere((extras["step"] >= 0) & np.asarray(rollouts.valid)[..., None]):
        found.append((p, g, k, int(extras["traj"][p, g]), int(extras["step"][p, g, k]), int(extras["match"][p, g, k]),
                      float(extras["step_rewards"][p, g, k])))
    return found


@pytest.mark.slow
def test_rollouts_have_the_steps_of_walks_and_read_patches_that_are_not_trained(walked):
    _, finished = walked
    forest, found = finished.forest, steps_of(finished.rollouts)
    assert {one[5] for one in found} == {0, 1} and len({one[:3] for one in found}) == len(found)
    for p in range(finished.rollouts.mask.shape[0]):
        for traj in range(4):
            mine = sorted(one[4:] for one in found if one[0] == p and one[3] == traj)
            assert [step for step, *_ in mine] == list(range(len(mine)))  # over all contexts, one after another
            assert all(reward == np.float32(1.0 if match else 0.1) for _, match, reward in mine)
            failed = sum(not match for _, match, _ in mine)
            assert len(mine) == 3 or failed == 3
    spoiled = [n for n in forest.leaves if forest.role[n] == Role.POLICY and forest.turn_info[n]["step"] > 0]
    patched = [text for text, role in zip(forest.texts, forest.role) if role == Role.ENVIRONMENT and "lower1" in text]
    assert spoiled and any(text.startswith("a") for text in patched)  # what the oracle says, in place of another message


@pytest.mark.slow
def test_advantages_are_those_of_steps_in_rows(walked):
    """The estimator on rows that are steps, [P, N], gives each token the advantage of its step."""
    run, finished = walked
    found, estimator = steps_of(finished.rollouts), run.learner.estimator
    values = np.asarray(estimator.update(jax.tree.map(jnp.asarray, finished.rollouts), estimator.init())[0])
    for p in range(values.shape[0]):
        mine = [one for one in found if one[0] == p]
        if not mine:
            continue
        extras = {name: np.array([[one[place] for one in mine]]) for name, place in (("traj", 3), ("step", 4), ("match", 5))}
        extras["step_rewards"] = np.array([[one[6] for one in mine]], np.float32)
        rows = from_lists([[0.0] * len(mine)], extras=extras)
        expected = np.asarray(advantages.make("ui_s1").update(rows, ())[0])[0, :, 0]
        for (_, g, k, *_), wanted in zip(mine, expected):
            here = np.asarray(finished.rollouts.token_mask)[p, g] & (np.asarray(finished.rollouts.step_ids)[p, g] == k)
            assert here.any()
            np.testing.assert_allclose(values[p, g][here], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_learns_in_packed_rows_and_resumes_bit_for_bit(tmp_path):
    shape = {"filters": "ui_s1", "learner.packed_rows": 2}
    loop.train(config(**shape), tmp_path / "straight")
    lines = run_files.lines(tmp_path / "straight")[1:]
    assert len(lines) == 3 and all(line["grad_norm"] > 0 and line["max/mismatch"] < 1e-4 for line in lines)
    loop.train(config(steps=2, **shape), tmp_path / "broken")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(config(**shape), tmp_path / "broken", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config(**shape)) for name in ("broken", "straight")))
