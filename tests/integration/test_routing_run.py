"""Runs of a mixture whose updates take the experts of the sampler, or those of the learner before its first update."""
import dataclasses
import json

import chatter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_files
import tiny_config

from jaxrl_llm import methods
from jaxrl_llm.data.columns import Column
from jaxrl_llm.engines.measures import MEASURES, Measure
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup, start
from jaxrl_llm.tools.registry import Kind

MIXTURE = {"method": "qwen_stabilizing", "model.experts": 4, "learner.minibatches": 2, "objective": "routing='sampler'",
           "samples_every": 0}
LAYERS, CHOSEN = 2, 2


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict(MIXTURE | {"steps": 3, "eval.every": 0} | changes)
    return config


def sampled(config):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    return run, state, run.source.next(run.learner.publish(state))


def with_other_router(params):
    """The parameters with routers that choose other experts."""
    router = {"kernel": -params["layers"]["router"]["kernel"]}
    return params | {"layers": params["layers"] | {"router": router}}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("scan", "slots"))
def test_learner_and_sampler_agree_and_other_routers_keep_the_experts(engine):
    run, state, done = sampled(tiny(**{"sampling.engine": engine}))
    rollouts, layout = done.rollouts, run.learner.layout
    routes = rollouts.extras["routes"]
    assert routes.shape == (*rollouts.mask.shape, LAYERS, CHOSEN) and routes.dtype == np.int16
    later = np.pad(rollouts.mask[..., 1:], ((0, 0), (0, 0), (0, 1)))
    assert (routes[later] >= 0).all() and (routes[~later] == -1).all()
    free = start.policy_of(run.config, run.learner.policy.model, run.learner.policy.mesh)
    np.testing.assert_array_equal(np.sort(free.routes(state.params, None, rollouts))[later], np.sort(routes)[later])
    placed, mask = run.learner.place(layout.ready(rollouts)), rollouts.mask
    same = np.asarray(layout.logprobs(state.params, None, placed)[0])
    np.testing.assert_allclose(same[mask], rollouts.behavior_logprobs[mask], atol=1e-5)
    other = with_other_router(state.params)
    kept = np.asarray(layout.logprobs(other, None, placed)[0])
    chosen = np.asarray(jax.jit(type(free).logprobs, static_argnums=0)(free, other, None, placed)[0])
    assert np.abs(kept - chosen)[later].max() > 1e-4 and np.abs(kept - same)[later].max() > 1e-4  # gates are the learner's
    packed = setup.build(tiny(**{"sampling.engine": engine, "learner.packed_rows": 4}))[0].learner.layout
    np.testing.assert_allclose(np.asarray(packed.logprobs(other, None, placed)[0])[mask], kept[mask], atol=1e-5)


@pytest.mark.slow
def test_the_learner_keeps_its_own_experts_over_the_updates_of_a_batch():
    """R2: without any, an update may choose others; the batch records those of before the first update."""
    run, state, done = sampled(tiny(objective="routing='learner'"))
    assert "routes" not in done.forest.columns and "routes" not in done.rollouts.extras
    before = run.learner.policy.routes(state.params, None, done.rollouts)
    before = np.asarray(before)
    learned = run.learner.learn(state, done.rollouts)
    np.testing.assert_array_equal(learned.rollouts.extras["own_routes"], before)
    assert learned.metrics["grad_norm"] > 0 and learned.metrics["moe/max_load"] >= 1


@pytest.fixture
def kept(monkeypatch):
    """A method that replays groups with their experts, and reads the rank of each drawn token, a column of this test."""
    def rank(config):
        def of_draw(logits, tokens):
            return (logits > jnp.take_along_axis(logits, tokens[:, None], axis=1)).sum(-1)
        return Measure(Column("rank", "token", np.int32, fill=-1, to="extras"), of_draw=of_draw)

    monkeypatch.setitem(MEASURES, "rank", Kind(rank))
    row = methods.METHODS["qwen_stabilizing"]
    monkeypatch.setitem(methods.METHODS, "kept", dataclasses.replace(
        row, slug="kept", replay="recent_groups(reuse=0.5)", needs=("rank",)))


@pytest.mark.slow
def test_resume_and_replay_keep_the_columns(kept, tmp_path):
    """Of groups in the buffer, and under a lag of a batch that waits."""
    changes = {"schedule": "pipelined(lag=1)", "learner.packed_rows": 4, "sampling.engine": "slots"}
    config = tiny(method="kept", **changes)
    loop.train(config, tmp_path / "straight")
    loop.train(tiny(method="kept", **changes, steps=2), tmp_path / "resumed")
    with pytest.warns(RuntimeWarning, match="steps: 2 -> 3"):
        loop.train(config, tmp_path / "resumed", resume=True)
    run_files.assert_same(*(run_files.saved(tmp_path / name, config) for name in ("resumed", "straight")))
    told = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("replay/share", 0) > 0 for line in told)


@pytest.mark.slow
def test_turns_of_an_environment_have_their_experts():
    run, state, done = sampled(chatter.get_config(**MIXTURE))
    routes, mask = done.rollouts.extras["routes"], done.rollouts.mask
    later = np.pad(mask[..., 1:], ((0, 0), (0, 0), (0, 1))) & mask
    assert (routes[later] >= 0).all() and (routes[~mask] == -1).all() and (~mask & done.rollouts.present).any()
    np.testing.assert_array_equal(
        np.sort(run.learner.policy.routes(state.params, None, done.rollouts))[later], np.sort(routes)[later])
    metrics = run.learner.learn(state, done.rollouts).metrics
    assert metrics["max/mismatch"] < 1e-4 and metrics["grad_norm"] > 0


@pytest.mark.parametrize(("changes", "message"), (
    ({"model.experts": 0}, "replays the experts of a mixture, and this model is dense; leave routing=free"),
    ({"model.experts": 0, "objective": "routing='learner'"}, "this model is dense"),
    ({"server.url": "http://127.0.0.1:9", "server.weights": "weights"},
     "reads the token column 'routes', which engine 'server' does not provide"),
    ({"objective": "routing='both'"}, "routing of qwen_stabilizing 'both'")))
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        setup.build(tiny(**changes))
