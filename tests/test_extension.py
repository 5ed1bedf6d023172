"""A topology, a recorder, a controller and a method of one's own, in a module outside the package, in a run by name."""
import dataclasses
import importlib
import pathlib
import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods
from jaxrl_llm.control.base import CONTROLLERS
from jaxrl_llm.learning import schedules
from jaxrl_llm.methods import provision
from jaxrl_llm.recorders import base as recorders
from jaxrl_llm.setup import forecast, parts, setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.learners import make_learner
from jaxrl_llm.store import own_code
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.tools import registry
from jaxrl_llm.topologies import base as topologies
from jaxrl_llm.topologies import single

P, G, T, POOL = 2, 4, 3, 6
RATE, WEIGHT = 0.5, 0.25

MODULE = '''
import jax
import numpy as np

from jaxrl_llm.maths import masked; from jaxrl_llm import methods
from jaxrl_llm.advantages import estimator, stateless
from jaxrl_llm.control import Controller, controller
from jaxrl_llm.data.forest import outcomes
from jaxrl_llm.recorders import Recorder, recorder
from jaxrl_llm.recorders.base import texts_of
from jaxrl_llm.topologies import Plan, Topology, groups, topology


@topology
def contrast(prompts, group, pool):
    """A group for each of `pool` problems; learned from are the `prompts` of them whose rewards differ most."""
    def plan(forest):
        if not forest.problems:
            return Plan(draw=pool)
        return Plan() if len(forest.ends) else Plan(acts=groups(range(pool), group))

    def choose(forest):
        spread = outcomes(forest, group)[0].std(1)
        return np.isin(np.arange(pool), np.argsort(-spread, kind="stable")[:prompts])

    return Topology(plan, choose, metrics=lambda forest: {"contrast/pool": float(len(forest.problems))})


@recorder("surprise", provides=("surprise",), passes=1)
def surprise(context):
    """`surprise` f32[P, G, T]: nats of each token beyond a mean over earlier batches, which is what is kept and trained."""
    def record(mean, params, lora, rollouts):
        return {"surprise": -context.logprobs(params, lora, texts_of(rollouts))[0] - mean}

    def fit(mean, policy, rollouts):
        seen = masked.mean(rollouts.extras["surprise"], rollouts.token_mask)
        return mean + 0.5 * seen, {"surprise/mean": mean}

    return Recorder("surprise", ("surprise",), record, init=lambda params: jax.numpy.ones(()), fit=fit)


@estimator
def surprised(*, weight: float = 1.0):
    """A = r - group mean + weight * (mean surprise of the rollout - its group mean)."""
    def advantages(rollouts):
        mean = masked.mean(rollouts.extras["surprise"], rollouts.token_mask, axis=-1)
        own = rollouts.rewards + weight * mean
        return own - masked.group_mean(own, rollouts.valid)

    return stateless(advantages, needs=("rewards", "surprise"))


@controller
def annealed(*, rate: float = 0.1, coldest: float = 0.3):
    """`temperature`: the configured one, a share `rate` lower after each step in which somebody was right."""
    def observe(temperature, facts):
        right = (facts["valid"] & (facts["rewards"] > 0.5)).any()
        return jax.numpy.where(right, jax.numpy.maximum(temperature * (1 - rate), coldest), temperature)

    return Controller(lambda temperature: jax.numpy.float32(temperature), lambda temperature: {"temperature": temperature},
                      observe, facts=("rewards", "valid"), knobs=("temperature",))


METHOD = methods.Method(slug="surprised", title="Surprise", equation="A = r + w s - mean", estimator="surprised",
                        topology="contrast(pool=6)", controllers="annealed(rate=0.5)")
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module, imported from a folder of its own; its method is in the catalogue until the test ends."""
    (tmp_path / "surprising_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("surprising_parts")
    monkeypatch.setitem(methods.METHODS, module.METHOD.slug, module.METHOD)
    yield module
    for table, name in ((sys.modules, "surprising_parts"), (advantages.base.ESTIMATORS, "surprised"),
                        (topologies.TOPOLOGIES, "contrast"), (recorders.RECORDERS, "surprise"), (CONTROLLERS, "annealed")):
        table.pop(name, None)


def tiny():
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.rewards = "format(pattern='(?s).*[a-z].*')"  # half of the output of an untrained model
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 1, 4, 48
    c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = P, G, T
    c.optimizer.learning_rate = 3e-3
    return c


@pytest.mark.slow
def test_a_topology_a_recorder_and_a_controller_of_ones_own_run_by_name(own):
    """Three steps by hand: whom the topology keeps, what the recorder measures, the temperature that the controller sets."""
    config = tiny()
    config.method, config.estimator, config.sampling.temperature = "surprised", f"weight={WEIGHT}", 1.5
    run, params = setup.build(config)
    source, learner = run.source, run.learner
    assert [one.name for one in learner.recorders] == ["surprise"] and run.needs == {"rewards", "surprise"}
    assert forecast.work_of(run.config, 8, run.needs, critic=False).passes == 1
    data = batches(source.task.train, P, run.config.seed)
    everyone = dataclasses.replace(source, data=data, topology=single(POOL, group=G))  # the same problems, uids and keys
    state = setup.initial_state(run, params)
    before = jax.device_get(state.params)
    score, mean, by_rewards, temperature, seen = jax.jit(learner.policy.logprobs), 1.0, [], 1.5, []

    steps = schedules.make("sync").steps(source, learner, state)
    for number in range(3):
        pool = everyone.next(learner.publish(state)).rollouts
        kept = np.sort(np.argsort(-pool.rewards.std(1), kind="stable")[:P])
        logprobs = np.asarray(score(state.params, None, jax.tree.map(lambda x: jnp.asarray(x[kept]), pool))[0])
        done = next(steps)
        state = done.learned.state

        rollouts = done.finished.rollouts
        assert rollouts.valid.shape == (P, G) and rollouts.valid.all() and source.next_uid == (number + 1) * POOL * G
        np.testing.assert_array_equal(rollouts.prompt_ids, pool.prompt_ids[kept])
        np.testing.assert_array_equal(rollouts.rewards, pool.rewards[kept])
        assert done.finished.metrics["contrast/pool"] == POOL
        by_rewards.append(kept.tolist())

        assert done.finished.metrics["control/temperature"] == pytest.approx(temperature)
        np.testing.assert_allclose(rollouts.temperature, temperature, rtol=1e-6)
        assert done.learned.metrics["max/mismatch"] < 1e-3
        seen.append(temperature)
        temperature = max(temperature * (1 - RATE), 0.3) if (rollouts.rewards > 0.5).any() else temperature
        assert float(state.control["annealed"]) == pytest.approx(temperature)

        mask = pool.mask[kept]
        surprise = np.where(mask, -logprobs - mean, 0)
        earned = rollouts.rewards + WEIGHT * surprise.sum(-1) / mask.sum(-1)
        expected = np.where(mask, (earned - earned.mean(1, keepdims=True))[..., None], 0)
        np.testing.assert_allclose(done.learned.advantages, expected, atol=1e-5)
        assert np.abs(expected).max() > 0.01 and done.learned.metrics["surprise/mean"] == pytest.approx(mean, abs=1e-5)
        mean += RATE * surprise.sum() / mask.sum()
        assert float(state.beside["surprise"]) == pytest.approx(mean, abs=1e-5)
    assert by_rewards != [[0, 1]] * 3  # not always those that came first
    assert int(state.step) == 3 and abs(mean - 1) > 0.1 and seen[0] == 1.5 and min(seen) < 1
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.params)))]
    assert min(moved) > 0


def test_the_code_of_such_parts_is_recorded_with_the_run(own, monkeypatch):
    """Each table alone leads to the module."""
    entries = [(advantages.base.ESTIMATORS, "surprised"), (CONTROLLERS, "annealed"), (recorders.RECORDERS, "surprise"),
               (topologies.TOPOLOGIES, "contrast")]
    for table, name in entries:
        with monkeypatch.context() as alone:
            alone.setattr(registry, "NAMED", set())
            for other, its_name in entries:
                if other is not table:
                    alone.delitem(other, its_name)
            assert [place["module"] for place in own_code.origins() if isinstance(place, dict)] == ["surprising_parts"], name


def example_of(doc: str, name: str, names: dict):
    """The object that the example in a docstring defines under this name."""
    code = textwrap.dedent("\n".join(re.findall(r"^(?:    .*)?$", doc.partition("To add one")[2], re.MULTILINE)))
    space = dict(names)
    exec(code, space)
    return space[name]


@pytest.mark.slow
def test_the_examples_of_the_docstrings_run_together(own):
    """Every prompt has two groups, and an estimator reads a recorder's array of both."""
    run, params = setup.build(tiny())
    twice = example_of(topologies.__doc__, "twice", vars(topologies))
    unregistered = {"recorder": lambda name, **_: lambda factory: factory}
    surprise = example_of(recorders.__doc__, "surprise", vars(recorders) | unregistered)
    centred = example_of(advantages.base.__doc__, "centred", vars(advantages.base) | {"estimator": lambda factory: factory})
    source = dataclasses.replace(run.source, topology=twice(prompts=P, group=G))
    made = parts.make_parts(run.config, run.config.model.hidden_size, source.task)
    learner, _ = make_learner(run.config, made, run.learner.policy, source.ladders)
    context = recorders.Context(**dict.fromkeys(recorders.Context._fields))._replace(logprobs=learner.layout.logprobs)
    state = learner.init(params, None, jax.random.key(1))
    finished = source.next(learner.publish(state))
    r = finished.rollouts
    assert r.valid.shape == (P, 2 * G) and r.valid.all() and len(finished.forest.problems) == P
    assert sorted(finished.forest.uid[finished.forest.ends]) == list(range(2 * P * G))
    score = jax.jit(learner.policy.logprobs)(state.params, None, jax.tree.map(jnp.asarray, r))[0]
    inner = r.rewards - WEIGHT * np.where(r.mask, score, 0).sum(-1) / r.mask.sum(-1)
    for estimator, earned in ((centred(scale=2.0), 2 * r.rewards), (own.surprised(weight=WEIGHT), inner)):
        one = dataclasses.replace(learner, estimator=estimator, recorders=(surprise(context),))
        learned = one.learn(jax.tree.map(jnp.copy, state), r)
        expected = np.where(r.mask, (earned - earned.mean(1, keepdims=True))[..., None], 0)
        np.testing.assert_allclose(np.asarray(learned.advantages).reshape(P, 2 * G, -1), expected, atol=1e-5)
        assert learned.rollouts.extras["surprise"].shape == learned.advantages.shape == (2 * P, G, r.mask.shape[2])


@pytest.mark.slow
def test_the_example_of_the_guide_runs(monkeypatch):
    """Of docs/guides/method.md: 24 problems, of which two are learned from, and the surprise that the estimator reads."""
    page = (pathlib.Path(__file__).parents[1] / "docs/guides/method.md").read_text()
    code = page.partition("## Who is sampled, and what is recorded")[2].partition("```python")[2].partition("```")[0]
    for table in (methods.METHODS, topologies.TOPOLOGIES, recorders.RECORDERS, advantages.base.ESTIMATORS):
        for name in ("surprised", "contrast", "surprise"):
            monkeypatch.setitem(table, name, None), monkeypatch.delitem(table, name)  # leaves with the test
    exec(code, {"__name__": "mine"})
    config = tiny()
    config.method = "surprised"
    run, params = setup.build(config)
    done = next(schedules.make("sync").steps(run.source, run.learner, setup.initial_state(run, params)))
    assert run.source.next_uid == 24 * G and done.finished.rollouts.valid.shape == (P, G)
    assert (np.asarray(done.learned.rollouts.extras["surprise"])[done.finished.rollouts.mask] > 0).all()


def test_a_method_runs_if_the_registered_parts_provide_what_it_needs(own, monkeypatch):
    row, built = own.METHOD, methods.build("surprised")
    assert methods.lacks("surprised") == () and "surprised" in methods.runnable()
    monkeypatch.delitem(recorders.RECORDERS, "surprise")
    assert provision.lacks(row, *built) == [("surprise", "a recorder, a topology or a task of your own")]
    config = tiny()
    config.method = "surprised"
    with pytest.raises(NotImplementedError, match="'surprised' needs surprise .from a recorder"):
        setup.build(config)
    taught = recorders.RecorderKind(own.surprise, needs=("config.teacher.base",), provides=("surprise",))
    monkeypatch.setitem(recorders.RECORDERS, "surprise", taught)
    with pytest.raises(NotImplementedError, match="needs surprise .from the recorder `surprise` with config.teacher.base"):
        setup.build(config)
    monkeypatch.setitem(recorders.RECORDERS, "surprise", recorders.RecorderKind(own.surprise, provides=("surprise", "dismay")))
    monkeypatch.setitem(methods.METHODS, "surprised", dataclasses.replace(row, needs=("dismay",)))
    with pytest.raises(ValueError, match="'surprise' is asked for dismay, and what its factory returned provides surprise"):
        setup.build(config)


def topology_of(name, **numbers):
    known = {"prompts": P, "group": G, "most": 4 * G, "rule": None, "guide": None}
    return topologies.make(name, (), known, numbers)


def test_a_topology_by_name_takes_what_it_names(own):
    for name in ("contrast", "surprising_parts:contrast"):
        empty = dataclasses.make_dataclass("Empty", [("problems", tuple)])(())
        assert topology_of(name, pool=POOL).plan(empty).draw == POOL and topologies.chosen(name, ()) == name
        with pytest.raises(ValueError, match=f"topology '{name}' takes .prompts, group, pool.: missing .* 'pool'"):
            topology_of(name)
        with pytest.raises(ValueError, match=f"the topology '{name}' does not read method.allocation.*by_rule"):
            topologies.chosen(name, {"method.allocation"})
    with pytest.raises(ValueError, match="topology 'contrasts'. Did you mean 'contrast'"):
        topology_of("contrasts")
    with pytest.raises(ValueError, match="function of surprising_parts 'contrasts'. Did you mean 'contrast'"):
        topology_of("surprising_parts:contrasts")
    with pytest.raises(ValueError, match="annealed returned a Controller; it must return a .*Topology"):
        topology_of("surprising_parts:annealed")
    assert topologies.chosen(None, ()) == "single" and topologies.chosen(None, {"group_sizes"}) == "sized"
    with pytest.raises(ValueError, match="the topology .* does not read .*, which this method has"):
        topologies.chosen(None, {"group_sizes", "method.allocation"})


def test_of_several_recorders_the_fitting_one_is_asked():
    asked = recorders.asked
    assert asked({"old_logprobs"}, ()) == {"old": {"old_logprobs"}}
    assert asked({"old_logprobs", "features"}, ()) == {"features": {"old_logprobs", "features"}}  # one pass gives both
    assert asked({"ref_logprobs", "base_logprobs"}, ()) == {"reference": {"ref_logprobs", "base_logprobs"}}
    assert asked({"ref_logprobs", "base_logprobs"}, {"config.teacher.base"}) == {
        "reference": {"ref_logprobs"}, "base": {"base_logprobs"}}  # as configured
    assert asked({"values", "rewards", "teacher_id"}, {"estimator.value_targets"}) == {"critic": {"values"}}
    with pytest.raises(ValueError, match="recorder 'old' is defined twice: in jaxrl_llm.recorders.old and "):
        recorders.recorder("old", provides=("old_logprobs",))(lambda context: None)


@pytest.mark.slow
def test_filters_see_whole_groups_of_several_rounds(monkeypatch):
    """A row that samples in rounds and drops prompts: no row of the catalogue does both."""
    row = dataclasses.replace(methods.get("reinforce_ada"), slug="both", filters="dynamic_sampling")
    monkeypatch.setitem(methods.METHODS, "both", row)
    config = tiny()
    config.method, config.sampling.max_group, config.sampling.max_draws = "both", 2 * G, 20
    run, params = setup.build(config)
    finished = run.source.next(run.learner.publish(setup.initial_state(run, params)))
    r = finished.rollouts
    assert r.valid.shape == (P, 2 * G) and len(finished.forest.problems) == P and set(r.valid.sum(1)) <= {G, 2 * G}
    spread = [np.ptp(rewards[valid]) for rewards, valid in zip(r.rewards, r.valid)]
    assert min(spread) > 0 and 0 < finished.metrics["filter/kept"] <= 1
