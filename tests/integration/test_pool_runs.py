"""Runs that share groups through a folder: the worked example of SAPO, the contents of a batch, several nodes in turns."""
import jax
import numpy as np
import pytest
import tiny_config
from run_files import lines

from jaxrl_llm import methods
from jaxrl_llm.data.rollouts import Role, from_lists
from jaxrl_llm.replay.pool import Pool, of_task
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup


def tiny(folder, method="swarm_sapo", **changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "pool.path": str(folder), **changes})
    return config


@pytest.mark.slow
def test_the_worked_example():
    """One own and one foreign group, both [1, 0, 0, 0]: advantages and the gradient over eight tokens, at a ratio of 1."""
    rollouts = from_lists([[1.0, 0, 0, 0]] * 2)
    row = methods.get("swarm_sapo")
    credited, _ = methods.build(row.slug)[0].update(rollouts, ())
    np.testing.assert_allclose(credited[..., 0], [[1.5, -0.5, -0.5, -0.5]] * 2, atol=1e-6)
    made = methods.build(row.slug)[1]
    logprobs = np.full((2, 4, 1), -1.0, np.float32)
    old = rollouts.replace(old_logprobs=logprobs)
    gradient = jax.grad(lambda x: made.update(x, old, credited, made.init())[0])(logprobs)
    np.testing.assert_allclose(gradient[..., 0], [[-0.1875, 0.0625, 0.0625, 0.0625]] * 2, atol=1e-6)


@pytest.mark.slow
def test_a_batch_holds_groups_of_others(tmp_path):
    """Of three shared groups one has equal rewards and one has another size; the third takes the place of a prompt."""
    run, params = setup.build(tiny(tmp_path))
    task = run.source.task.train
    other = Pool(tmp_path, "other", of_task(task), 3600.0)
    other.publish(4, [(task[7], ["ab", "1", "2", "cdefghijk"]), (task[8], ["a"] * 4), (task[9], ["a", "1"])])
    state = setup.initial_state(run, params)
    first_uid = run.source.next_uid
    finished = run.source.next(run.learner.publish(state))
    rollouts, metrics = finished.rollouts, finished.metrics
    assert rollouts.extras["replayed"].tolist() == [[False] * 4] * 3 + [[True] * 4]
    assert rollouts.rewards[3].tolist() == [1, 0, 0, 1] and rollouts.prompt_ids[3] == 7
    tokenizer = run.source.stream.tokenizer
    assert rollouts.tokens[3, 0, :3].tolist() == [*tokenizer.encode("ab"), tokenizer.eos_id]
    assert rollouts.tokens[3, 3].tolist() == tokenizer.encode("cdefgh") and rollouts.extras["truncated"][3, 3]  # T is 6
    assert metrics["writer/other/share"] == 0.25 and metrics["writer/other/reward"] == 0.5
    assert metrics["pool/groups"] == 1 and metrics["pool/left_size"] == 1 and metrics["pool/read"] == 2
    assert finished.counts["tried"].sum() == 12 and run.source.next_uid == first_uid + 16
    assert len({*finished.forest.uid[finished.forest.ends].tolist()}) == 16
    foreign = rollouts.role == Role.EXPERT
    assert (foreign == rollouts.mask & rollouts.extras["replayed"][..., None]).all()
    assert np.isnan(rollouts.behavior_logprobs[foreign]).all() and finished.forest.aided.tolist() == [False] * 12 + [True] * 4
    learned = run.learner.learn(state, rollouts, facts=finished.facts)
    assert learned.metrics["max/ratio"] == 1 and np.isfinite(learned.metrics["loss"]) and learned.metrics["max/mismatch"] < 1e-4
    mine = [one for one in other.read(4)[0] if one.node != "other"]
    assert {one.problem for one in mine} <= {*rollouts.prompt_ids[:3].tolist()} and {one.step for one in mine} <= {0}


@pytest.mark.slow
@pytest.mark.parametrize("changes", ({"method": "tis_mis"}, {"estimator": "xrpo_advantage"}), ids=str)
def test_what_others_sampled_has_weight_one(tmp_path, changes):
    """The text of a pool has no log-probs; those of the policy before its update count in their place."""
    run, params = setup.build(tiny(tmp_path, **changes))
    task = run.source.task.train
    Pool(tmp_path, "other", of_task(task), 3600.0).publish(4, [(task[7], ["ab", "1", "2", "cd"])])
    state = setup.initial_state(run, params)
    finished = run.source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    batch = jax.device_get(learned.rollouts)
    foreign = batch.mask & (batch.role == Role.EXPERT)
    assert foreign.any() and (batch.behavior_logprobs[foreign] == batch.old_logprobs[foreign]).all()
    assert learned.metrics["skipped_updates"] == 0 and learned.metrics["max/mismatch"] < 1e-4


def test_an_empty_pool_changes_nothing(tmp_path):
    """The batch equals that of a run without a pool, and the pool has its samples."""
    batches = []
    for folder in (tmp_path / "pool", ""):
        run, params = setup.build(tiny(folder))
        batches.append(run.source.next(run.learner.publish(setup.initial_state(run, params))))
    np.testing.assert_array_equal(batches[0].rollouts.tokens, batches[1].rollouts.tokens)
    assert batches[0].metrics["pool/groups"] == 0 and "pool/groups" not in batches[1].metrics
    assert len(list((tmp_path / "pool").iterdir())) == 1


def test_impossible_settings_are_refused(tmp_path):
    for method, words in (("sil", "replays rollouts of its own"), ("luffy", "shows solutions"),
                          ("dars", "samples prompts unequally"), ("gdro_rollout", "samples prompts unequally")):
        with pytest.raises(ValueError, match=words):
            setup.build(tiny(tmp_path, method, **{"sampling.max_group": 16}))
    with pytest.raises(ValueError, match="config.pool.groups=4 of the prompts.per_step=4"):
        setup.build(tiny(tmp_path, **{"pool.groups": 4}))
    with pytest.raises(ValueError, match="config.pool.max_age is 0"):
        setup.build(tiny(tmp_path, **{"pool.max_age": 0.0}))


@pytest.mark.slow
def test_nodes_learn_from_each_other(tmp_path):
    """Three nodes with different seeds take turns, with garbage in the folder; the first continues and reads others' groups."""
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "broken-1.json").write_text("{")
    options = {"eval.every": 0, "samples_every": 0, "checkpoint.every": 3, "task": "arithmetic(level=digit, size=40)"}
    for seed in range(3):
        loop.train(tiny(tmp_path / "pool", steps=3, seed=seed, **options), tmp_path / str(seed))
    loop.train(tiny(tmp_path / "pool", steps=6, seed=0, **options), tmp_path / "0", resume=True)
    first, last = lines(tmp_path / "0")[1], lines(tmp_path / "0")[4:]
    assert first["pool/read"] == 0 and first["pool/left_garbage"] == 1
    assert all(line["pool/read"] >= 2 and line["pool/groups"] == 2 for line in last)
    assert all(np.isfinite(line["loss"]) and line["max/ratio"] == 1 for line in last)
