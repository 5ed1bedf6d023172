"""V0.5 in the training loop: resume bit for bit, draws and their counts, wrong priors, unequal groups in the loss."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm.compare import ledger
from jaxrl_llm.control.prompt_average import PromptAverage
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.values.v0_5 import draws_used

pytestmark = pytest.mark.slow

P, G, MOST = 4, 2, 6


def config(**changes):
    c = tiny_config.get_config()
    c.method, c.prompts.per_step, c.sampling.group, c.sampling.max_group = "v0_5", P, G, MOST
    c.samples_every, c.eval.every, c.checkpoint.every, c.steps = 1, 2, 2, 4
    c.update_from_flattened_dict(changes)
    return c


def lines(workdir):
    return [run_files.repeatable(line) for line in run_files.lines(workdir)]


def page(workdir, step):
    return [json.loads(line) for line in (workdir / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("v0_5")
    loop.train(config(), workdir)
    return workdir


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(straight, tmp_path):
    loop.train(config(steps=2), tmp_path)
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 4"):
        loop.train(config(), tmp_path, resume=True)
    result, wanted = (run_files.saved(workdir, config()) for workdir in (tmp_path, straight))
    assert wanted[".control['prior'].weight"].sum() > 0
    run_files.assert_same(result, wanted)
    assert lines(tmp_path) == lines(straight)


def test_all_draws_are_counted(straight):
    tokens, sizes = [], []
    for line in lines(straight)[1::2]:  # the pages of the others hold held-out problems
        rows = page(straight, line["step"])
        groups = np.bincount([row["prompt_index"] for row in rows])
        assert len(groups) == P and set(groups) <= {2, 4, 6}
        assert line["completion/tokens"] == sum(row["length"] for row in rows)
        assert line["completion/length"] == pytest.approx(line["completion/tokens"] / len(rows))
        assert line["v0_5/rollouts"] == pytest.approx(groups.mean()) and line["groups/largest"] == groups.max()
        of_prompt = [np.mean([row["reward"] for row in rows if row["prompt_index"] == p]) for p in range(P)]
        assert line["reward/mean"] == pytest.approx(np.mean(of_prompt))
        assert np.isfinite([line["loss"], line["grad_norm"]]).all() and abs(line["max/ratio"] - 1) < 1e-4
        tokens.append(line["completion/tokens"])
        sizes += groups.tolist()
    assert len(set(sizes)) > 1
    spent = ledger.read_run(straight, ("tokens", "flops")).spent
    np.testing.assert_array_equal(np.diff(spent["tokens"])[::2], tokens)
    assert (np.diff(spent["flops"]) > 0).all()


@pytest.fixture(scope="module")
def built():
    return setup.build(config())


def step_with(built, average, truth=None):
    """One batch of a fresh policy whose prior says `average` of every prompt: `(prior before, finished, state, metrics)`."""
    run, params = built
    state = setup.initial_state(run, jax.tree.map(lambda x: x + 0, params))
    known = state.control["prior"]
    N = known.average.size
    prior = PromptAverage(jnp.full(N, average), jnp.ones(N))
    state = state.replace(control={"prior": jax.device_put(prior, jax.tree.map(lambda x: x.sharding, known))})
    before = jax.tree.map(np.asarray, state.control["prior"])
    problems = [run.source.task.train[i] for i in (5, 0, 9, 2)]
    source = dataclasses.replace(run.source, data=run_files.Given(problems))
    finished = source.next(run.learner.publish(state))
    learned = run.learner.learn(state, finished.rollouts, facts=finished.facts)
    return before, finished, learned.state, learned.metrics | finished.metrics


def test_a_wrong_prior_costs_rollouts_and_nothing_else(built):
    counts = {}
    for average in (-3.0, 0.5, 4.0):
        _, (sampled, *_), state, metrics = step_with(built, average)
        counts[average] = sampled.valid.sum(1)
        assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all() and metrics["skipped_updates"] == 0
        assert average == 0.5 or metrics["v0_5/rejected"] == 1
        # The rounds stop where the rule applied to the finished draws says so.
        wanted = draws_used(jnp.full(P, average), jnp.asarray(sampled.rewards), variance=0.25, k_init=G, chunk=G)
        assert counts[average].tolist() == wanted.tolist()
        assert (np.sort(~sampled.valid, axis=1) == ~sampled.valid).all()  # in the order of their draws
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
    assert (counts[-3.0] == MOST).all() and (counts[4.0] == MOST).all()
    assert counts[0.5].sum() < P * MOST


def test_the_prior_learns_from_all_draws(built):
    before, (sampled, forest, *_), state, _ = step_with(built, 0.25)
    rewards, valid, learned = sampled.rewards, sampled.valid, state.control["prior"]
    for row, problem in enumerate(forest.problems):
        n = valid[row].sum()
        np.testing.assert_allclose(learned.weight[problem.id], 0.5 + n, rtol=1e-6)
        np.testing.assert_allclose(learned.average[problem.id], (0.5 * 0.25 + rewards[row, valid[row]].sum()) / (0.5 + n),
                                   rtol=1e-5)
    others = np.setdiff1d(np.arange(before.average.size), [problem.id for problem in forest.problems])
    np.testing.assert_array_equal(np.asarray(learned.average)[others], before.average[others])
    np.testing.assert_array_equal(forest.facts["expected"], np.float32(0.25))


def test_every_rollout_drawn_has_its_share_of_the_gradient(built):
    """The loss of the learner's rows is `- sum(A) / tokens` over all draws, with `A` by hand in float64."""
    _, (sampled, *_), _, metrics = step_with(built, 0.45)
    valid, rewards, lengths = sampled.valid, sampled.rewards.astype(float), sampled.mask.sum(-1)
    count = valid.sum(1)
    assert len(set(count.tolist())) > 1 or pytest.fail("these draws are equally many; take another prior or seed")
    mean = (rewards * valid).sum(1) / count
    away2 = np.maximum((mean - 0.45) ** 2, 1e-30)
    baseline = 0.45 + np.maximum(1 - 0.25 / count / away2, 0) * (mean - 0.45)
    A = np.where(valid, rewards - baseline[:, None], 0)
    assert metrics["loss"] == pytest.approx(-(A * lengths).sum() / (lengths * valid).sum(), abs=1e-5)
    assert metrics["completion/tokens"] == lengths.sum() == (lengths * valid).sum()
