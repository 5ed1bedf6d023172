"""One file outside the package adds a part of every kind; runs name each as "module:function" and no other line changes."""
import dataclasses
import sys

import chatter
import numpy as np
import pytest

from jaxrl_llm import topologies
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools import registry

P, G, T = 4, 4, 3

MODULE = '''
import itertools

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import stateless
from jaxrl_llm.control import Controller, Filter
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.data.columns import Column
from jaxrl_llm.engines import scan
from jaxrl_llm.engines.measures import Measure, measure
from jaxrl_llm.environments import Environment, Turn
from jaxrl_llm.learning.schedules import Schedule, sync
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives import token_objective
from jaxrl_llm.objectives.terms import Term
from jaxrl_llm.recorders import Recorder, recorder
from jaxrl_llm.replay import Replay
from jaxrl_llm.rewards import Reward
from jaxrl_llm.sampling.stages.base import Stage, stage, with_extras
from jaxrl_llm.tasks import Problem, Task
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.topologies import Plan, Rule, Topology, experts, topology
from jaxrl_llm.topologies.acts import groups
from jaxrl_llm.topologies.base import asked, everyone

LONELY = Conflict(("config.sampling.min_p",), "{part} of {method} reads no cut distribution", "set min_p=0")
sums, calls = [], itertools.count()


def centred(*, scale=1.0):
    def advantages(rollouts):
        own = rollouts.rewards + rollouts.extras["evenness"]
        return scale * (own - masked.group_mean(own, rollouts.valid))

    return stateless(advantages, needs=("rewards", "evenness", "likelier"))


def moody():
    return stateless(lambda rollouts: rollouts.extras["moods"][:, None] * rollouts.rewards, needs=("rewards", "moods"))


@stage(provides=("moods",))
def mooded():
    def view(rollouts, batch, source):
        return with_extras(rollouts, moods=batch.knobs["mood"] + np.arange(len(rollouts.valid), dtype=np.float32))

    return Stage("mooded", view=view, provides=("moods",), reads=(Knob("mood", doc="f32[]"),))


def better():
    return Controller(lambda: 1.0, lambda mood: {"mood": mood}, lambda mood, facts: mood, facts=("rewards",), knobs=("mood",))


def plain(*, aggregation="token_mean", max_len=None):
    return token_objective(lambda logprobs, rollouts, advantages: (-advantages * logprobs, {"outside/logprob": logprobs}),
                           aggregation=aggregation, max_len=max_len)


def unlikely(*, coef, least=0.0):
    return Term("unlikely", coef, lambda logprobs, rollouts: jnp.maximum(least - logprobs, 0), metric="outside/unlikely")


def first_prompts(*, most=2):
    return Filter(lambda rollouts: jnp.arange(len(rollouts.valid)) < most, needs=(), refills=False)


def warmer(*, rise=0.5):
    return Controller(lambda temperature: jnp.float32(temperature), lambda t: {"temperature": t, "token_cost": 0.25 * t},
                      lambda t, facts: t + rise * (facts["taken"] > 0), facts=("rewards", "taken"),
                      knobs=("temperature", "token_cost"))


def dearer(*, most=9.0):
    def grow(batch, source):
        rewards, ends = batch.forest.rewards.copy(), batch.new_ends
        rewards[ends] -= np.minimum(batch.knobs["token_cost"] * batch.forest.length[ends], most)
        return batch._replace(forest=batch.forest.with_columns(rewards=rewards))

    def end(batch, source):
        return batch.measured(counts={"taken": np.float32(batch.knobs["token_cost"] * batch.forest.length.sum())})

    return Stage("dearer", grow=grow, end=end, provides=("taken",), reads=(
        Knob("token_cost", least=0, doc="f32[], the cost of a token"),))


@topology(takes={"limit": "config.sampling.max_tokens", "letters": "task"})
def twice(prompts, group, limit, letters, rounds=2):
    def plan(forest):
        if not forest.problems:
            return Plan(draw=prompts)
        return Plan(acts=groups(np.flatnonzero(asked(forest) < rounds * group), group))

    return Topology(plan, everyone, most=rounds * group, metrics=lambda forest: {
        "outside/rounds": float(rounds), "outside/limit": float(limit), "outside/problems": float(len(letters.train))})


def unlucky(*, extra=4):
    return Rule(lambda rewards, valid, first, most: np.where((valid.sum(1) == first) & (np.arange(len(valid)) < 2), extra, 0))


@topology(conflicts=(LONELY,), provides=("expert", "hinted", "hint_mask", "expert_logprobs"))
def halves(inner, group, traces=1):
    return experts(inner, group=group, traces=traces, share=0.5)


def again(*, share=0.5):
    return Replay(lambda rewards, valid: valid, max_age=2, groups=lambda born, version, prompts, rng: np.arange(len(born))[
        :int(share * prompts)])


@recorder("evenness", provides=("evenness",))
def evenness(context):
    return Recorder("evenness", ("evenness",), lambda own, params, lora, rollouts: {
        "evenness": jnp.where(rollouts.prompt_ids[:, None] % 2 == 0, 0.5, 0.0) * jnp.arange(rollouts.valid.shape[1])})


@measure("likelier")
def likelier(config):
    def of_draw(logits, tokens):
        return (logits > jnp.take_along_axis(logits, tokens[:, None], axis=1)).sum(-1)

    return Measure(Column("likelier", "token", np.int32, fill=-1, to="extras"), of_draw=of_draw)


def counted(*, times=1):
    def steps(*arguments, **keywords):
        for step in sync.steps(*arguments, **keywords):
            next(calls)
            yield step

    return Schedule(steps)


def own_engine(run):
    return scan.kind(run)._replace(name="own_engine")


def letters(*, size=12):
    rows = [Problem(f"Say {i}.", str(i), i, extra={"solution": "abc"}) for i in range(size)]
    return Task("letters", rows[:-4], rows[-4:], "outside_parts:vowels")


def vowels(*, weight=1.0):
    return Reward("vowels", lambda completion, answer, problem: float(completion[:1] < "M"), weight)


def answered(*, turns=2):
    def reset(problem, key):
        return {"turn": 0}, [{"role": "user", "content": problem.prompt}]

    def step(state, message):
        state["turn"] += 1
        return Turn([{"role": "user", "content": "Go on."}], 0.5 * (message["content"][:1] < "M"), state["turn"] == turns, {})

    return Environment("answered", letters(), reset, step)
'''


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The folder of the module; what it registers leaves with the test."""
    (tmp_path / "outside_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    before = [(table, dict(table)) for table in registry.TABLES]
    yield
    sys.modules.pop("outside_parts", None)
    for table, known in before:
        for name in table.keys() - known.keys():
            del table[name]


def named(**changes):
    c = default_config()
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 1, 4, 48
    c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = P, G, T
    c.task = "outside_parts:letters(size=14)"
    for key, value in changes.items():
        c[key] = value.replace("out:", "outside_parts:")
    return c


def steps_of(config, count=1):
    """The run, and its first steps."""
    run, params = setup.build(config)
    steps = run.schedule.steps(run.source, run.learner, setup.initial_state(run, params))
    return run, [next(steps) for _ in range(count)]


@pytest.mark.slow
def test_a_run_of_parts_from_one_file(outside):
    """Estimator, objective, term, filter, controller, stage with a knob, topology, recorder, measure, schedule, engine, task
    and reward."""
    config = named(estimator="out:centred(scale=2.0)", objective="out:plain + out:unlikely(0.5, least=-1.0)",
                   filters="out:first_prompts", controllers="out:warmer(rise=0.5)", stages="out:dearer", topology="out:twice",
                   schedule="out:counted(times=2)")
    config.sampling.engine = "outside_parts:own_engine"
    run, (first, second) = steps_of(config, 2)
    r, learned = first.finished.rollouts, first.learned
    kept = r.valid.any(1)
    assert r.valid.shape == (P, 2 * G) and kept.sum() == 2 and r.valid[kept].all()  # both rounds; two prompts of four are left
    assert run.source.stream.kind.name == "own_engine" and next(sys.modules["outside_parts"].calls) == 2
    assert run.source.task.name == "letters" and len(run.source.task.train) == 10
    metrics = [{**one.finished.metrics, **one.learned.metrics} for one in (first, second)]
    assert [metrics[0][f"outside/{name}"] for name in ("rounds", "limit", "problems")] == [2, T, 10]  # values of the run
    assert [one["control/temperature"] for one in metrics] == [1.0, 1.5]
    starts = np.array([[text[:1] < "M" for text in first.finished.forest.texts]]).reshape(-1)
    assert 0 < starts.mean() < 1
    earned = (r.rewards + 0.25 * np.asarray(r.lengths))[kept]  # the stage took a quarter for each token, at temperature 1
    assert set(np.unique(earned.round(5))) <= {0.0, 1.0}
    even = np.where(np.asarray(r.prompt_ids)[:, None] % 2 == 0, 0.5, 0.0) * np.arange(2 * G)
    likelier = np.asarray(learned.rollouts.extras["likelier"])
    assert likelier.shape[-1] == T and likelier.min() >= 0 and likelier.max() > 9
    got = np.asarray(learned.advantages).reshape(2, 2 * G, -1)[..., 0]
    own = (r.rewards + even)[kept]
    np.testing.assert_allclose(got, 2 * (own - own.mean(1, keepdims=True)), atol=1e-5)
    assert metrics[0]["outside/logprob"] < -3 and metrics[0]["outside/unlikely"] > 1  # near log 259, a nat less


@pytest.mark.slow
@pytest.mark.parametrize("changes, shape, fact", (
    ({"allocation": "out:unlucky(extra=4)"}, (P, 4 * G), lambda r, m: set(r.valid.sum(1)) == {G, 2 * G}),
    ({"guidance": "out:halves(traces=2)"}, (P, G), lambda r, m: (np.asarray(r.extras["hinted"]).sum(1) == 2).all()),
    ({"replay": "out:again(share=0.5)"}, (P, G), lambda r, m: m["replay/share"] == 0.5)))
def test_rules_experts_and_replays_from_one_file(outside, changes, shape, fact):
    run, done = steps_of(named(**changes), 2)
    r = done[-1].finished.rollouts
    assert r.valid.shape == shape and fact(r, done[-1].finished.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("stages", ("", "out:mooded"))
def test_a_stage_that_a_run_makes_for_an_estimator_from_one_file(outside, stages):
    """It reads a knob. It is made once, also where the configuration names it."""
    run, (done,) = steps_of(named(estimator="out:moody", controllers="out:better", stages=stages))
    assert [one.name for one in run.source.stages].count("mooded") == 1
    wanted = (1 + np.arange(P))[:, None] * done.finished.rollouts.rewards
    np.testing.assert_allclose(np.asarray(done.learned.advantages)[..., 0], wanted, atol=1e-6)


@pytest.mark.slow
def test_an_environment_from_one_file(outside):
    run, (done,) = steps_of(chatter.get_config(environment="outside_parts:answered(turns=2)"))
    r = done.finished.rollouts
    assert run.source.task.name == "letters" and 0 < r.rewards.mean() < 1 and set(np.unique(r.rewards)) <= {0.0, 0.5, 1.0}
    assert done.finished.metrics["environment/turns"] == 2


TABLES = {"estimator": "centred", "objective": "plain", "term": "unlikely", "filter": "first_prompts", "controller": "warmer",
          "stage": "dearer", "allocation rule": "unlucky", "replay rule": "again", "schedule": "counted",
          "task": "letters", "reward": "vowels", "environment": "answered"}


def test_every_table_reads_functions_of_that_file_in_one_way(outside):
    tables = {table.what: table for table in registry.TABLES}
    for what, name in TABLES.items():
        table, needed = tables[what], {"coef": 1.0} if what == "term" else {}
        assert isinstance(table.make(f"outside_parts:{name}", **needed), table.made), what
        with pytest.raises(ValueError, match="mood"):
            table.make(f"outside_parts:{name}", mood=1, **needed)
        with pytest.raises(ValueError, match=f"function of outside_parts '{name}s'. Did you mean '{name}'"):
            table.make(f"outside_parts:{name}s")
        with pytest.raises(ValueError, match="returned a .*; it must return a"):
            table.make("outside_parts:" + ("warmer" if what != "controller" else "letters"))
    assert tables["engine"].find("outside_parts:own_engine").make.__name__ == "own_engine"
    assert tables["topology"].parameters("outside_parts:twice").keys() == {
        "prompts", "group", "limit", "letters", "rounds"}
    assert tables["topology"].order("outside_parts:twice") == ["rounds"]  # what a text may set
    assert tables["recorder"]["evenness"].provides == ("evenness",) and "likelier" in tables["measure"]


def test_a_part_from_outside_refuses_what_it_cannot_be_with(outside):
    config = named(guidance="out:halves")
    config.sampling.min_p = 0.1
    with pytest.raises(ValueError, match="topology 'outside_parts:halves' of grpo reads no cut distribution; set min_p=0"):
        setup.build(config)


def test_a_fact_and_a_value_that_no_part_has_are_said_before_the_run(outside, monkeypatch):
    """The controller reads a fact that its stage tells; a topology may take every value of the run."""
    assert setup.against("grpo", {"controllers": "outside_parts:warmer", "stages": "outside_parts:dearer"}) == []
    unread, untold = setup.against("grpo", {"controllers": "outside_parts:warmer"})
    assert "sets 'token_cost', which no part of this run reads" in unread
    assert untold.startswith("controller 'outside_parts:warmer': Unknown fact 'taken'. Allowed: entropy, lengths, ")
    assert setup.against("grpo", {"topology": "outside_parts:twice"}) == []
    monkeypatch.setitem(topologies.TOPOLOGIES, "twice", dataclasses.replace(
        topologies.TOPOLOGIES["twice"], takes={"limit": "config.sampling.max_token", "letters": "task"}))
    assert setup.against("grpo", {"topology": "twice"}) == [
        "topology 'twice' takes limit from 'config.sampling.max_token', which is no value of this run; did you mean "
        "'config.sampling.max_tokens'?"]
