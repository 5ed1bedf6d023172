"""What `methods.provision` says that a run provides is in the rollouts of a finished step, for one run of each kind."""
import dataclasses

import chatter
import pytest
import tiny_config

from jaxrl_llm import environments, methods, recorders, topologies
from jaxrl_llm.data.rollouts import CURRENT_ENTROPIES, Rollouts
from jaxrl_llm.engines import measures
from jaxrl_llm.methods import provision
from jaxrl_llm.setup import parts, setup
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.setup.readers import readers
from jaxrl_llm.setup.resolve import resolve


def in_groups(**changes):
    """Half of the completions are rewarded, for letters, and the answers of all are read."""
    config = tiny_config.get_config()
    config.rewards, config.score, config.critic.pretrain_steps = f"{config.rewards}, exact(weight=0.1)", "exact", 0
    config.update_from_flattened_dict(changes)
    return config


KINDS = {
    "single": in_groups(),
    "rounds": in_groups(method="v0_5", **{"sampling.max_group": 8}),
    "experts": in_groups(method="luffy"),
    "hints": in_groups(method="adhint_schedule"),
    "written elsewhere": in_groups(recorders="written, token_seeds"),
    "replay": in_groups(method="sil"),
    "features": in_groups(method="poise", **{"learner.minibatches": 2}),
    "features beside a function of logits": in_groups(method="poise", objective="otr(samples=0)"),
    "gradients": in_groups(method="vcpo"),
    "mixture": in_groups(method="qwen_stabilizing", objective="routing='learner'", **{
        "model.experts": 4, "learner.minibatches": 2}),
    "greedy rewards": in_groups(method="remax"),
    "pulls": in_groups(method="optimal_token_baseline"),
    "greedy": in_groups(method="b_coder"),
    "environment": chatter.get_config(method="gigpo"),
    "agents": chatter.get_config(method="dr_mas", environment="chatter:duel"),
    "critic of turns": chatter.get_config(method="archer", **{"critic.pretrain_steps": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_says_it_provides_is_in_its_rollouts(kind):
    run, params = setup.build(KINDS[kind])
    frozen, state = run.learner.frozen(params), setup.initial_state(run, params)
    for _ in range(2):  # what is replayed has to be sampled first
        finished = run.source.next(run.learner.publish(state))
        state, _, batch, _ = run.learner.learn(state, finished.rollouts, frozen, facts=finished.facts)
    there = {field.name for field in dataclasses.fields(Rollouts) if getattr(batch, field.name) is not None} | {*batch.extras}
    there |= {CURRENT_ENTROPIES, *(name for one in finished.replayed for name in one.extras)}  # an update adds the first

    runner = run.source.stream.partner.runner
    environment = None if runner is None else runner.environment
    made = parts.make_parts(run.config, run.learner.policy.model.config.hidden_size, run.source.task, environment)
    said = provision.provided(made.method, made.estimator, made.there)
    fields = {name for name in said if "." not in name} - {knob.name for reads in readers().values() for knob in reads}
    # Made for methods that need them:
    on_demand = recorders.recordable(said) | {"prior", *measures.MEASURES} | (provision.sampled() - provision.SAMPLED)
    if environment is not None:
        on_demand |= {"answers"}  # refused, see `environments.base.CONFLICTS`
    wanted = fields - (on_demand - made.needs)
    assert wanted >= made.needs and wanted <= there, wanted - there
    if run.learner.joint is None:
        assert (made.needs & recorders.recordable(said)) - provision.SAMPLED <= {
            field for one in run.learner.recorders for field in one.provides}


def test_every_registered_provider_is_tried():
    """The kinds above have each recorder and each topology that provides something; teachers have tests of their own."""
    asked, chosen = set(), set()
    for config in KINDS.values():
        config = resolve(config, methods.get(config.method).defaults)
        judge = make_judge(config)
        made = parts.make_parts(config, 32, judge.task, judge.environment)
        asked |= {*recorders.asked(parts.recorded_needs(config, made.needs), made.there | provision.sampled())}
        chosen |= {topologies.chosen(None, made.there), *(name for name, _ in made.method.parts("guidance"))}
    assert asked == recorders.RECORDERS.keys() - {"teacher", "base"}
    assert chosen >= {name for name, kind in topologies.TOPOLOGIES.items() if kind.provides} | {"single", "rounds"}


def test_environments_have_the_facts_that_messages_name():
    """`provision.ELSEWHERE` says which environment could help; it really has the fact."""
    named = {who.partition("`")[2].partition("`")[0]: field for field, who in provision.ELSEWHERE.items() if "`" in who}
    assert named.keys() == {"purified", "skill_chain", "ranked_list", "walked"}
    for name, field in named.items():
        assert field in environments.make(name).facts
    tools = {field for field, who in provision.ELSEWHERE.items() if who == "an environment with tools"}
    assert tools <= chatter.FACTS.keys() | environments.make("tool_use").facts.keys()
