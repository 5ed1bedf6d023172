"""Parts that a configuration names or changes by number, one's own among them, and all that is wrong with such texts."""
import dataclasses
import importlib
import re
import sys

import jax.numpy as jnp
import ml_collections
import pytest

from jaxrl_llm import methods, objectives
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.methods import composition, texts
from jaxrl_llm.objectives.terms import TERMS, Term, term
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import numbers, parts
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.phases import phases_of

OWN = '''
"""A part of one's own for every key."""
from jaxrl_llm.advantages import rloo
from jaxrl_llm.control import Controller, Filter
from jaxrl_llm.methods import Method
from jaxrl_llm.objectives import ppo_clip
from jaxrl_llm.objectives.terms import Term
from jaxrl_llm.recorders import Recorder, recorder
from jaxrl_llm.replay import Replay
from jaxrl_llm.topologies import Rule, experts, single


def credit():
    return rloo()


def loss(clip=0.3):
    return ppo_clip(clip_high=clip)


def term(coef):
    return Term("flat", coef, lambda logprobs, rollouts: logprobs)


def keep(least=1):
    return Filter(lambda rollouts: rollouts.valid.sum(1) >= least, needs=("valid",))


def steer(by=2.0):
    return Controller(lambda: by, lambda state: {"learning_rate": state}, lambda state, facts: state, (), ("learning_rate",))


def store(size=64):
    return Replay(lambda rewards, valid: valid, capacity=size)


def more(extra=4):
    return Rule(lambda rewards, valid, first, most: 0 * rewards[:, 0].astype(int) + extra)


def begun(inner, group):
    return experts(inner, group=group, share=0.5)


def once(prompts, group):
    return single(prompts, group=group)


@recorder("noise", provides=("noise",))
def noise(context):
    return Recorder("noise", ("noise",), lambda own, params, lora, rollouts: {"noise": rollouts.mask * 0.0})


row = Method(slug="mine", title="My own", equation="A = r - mean", estimator="own_parts:credit",
             objective="own_parts:loss(0.25)")
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `own_parts` on the path; what it enters leaves the tables with the test."""
    from jaxrl_llm.recorders import RECORDERS
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_parts")
    RECORDERS.pop("noise", None)
    sys.modules.pop("own_parts", None)


def tiny(**changes):
    config = default_config()
    config.task, config.sampling.max_tokens = "arithmetic(level=digit)", 6
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize("method, key, given, text", (
    ("grpo", "estimator", "", "grpo"), ("grpo", "estimator", "rloo", "rloo"),
    ("grpo", "estimator", "eps=1e-4", "grpo(eps=0.0001)"), ("dapo", "filters", "none", ""), ("grpo", "filters", " none ", ""),
    ("rapo", "controllers", "at_least=3", "pass_rate(at_least=3)"),
    ("rapo", "controllers", "siri, pass_rate", "siri, pass_rate"), ("rapo", "replay", "none", ""),
    ("dart_curation", "controllers", "longest=3", None),
    ("grpo", "objective", "cispo(max_ratio=4) + kl(0.01)", "cispo(max_ratio=4) + kl(0.01)"),
    ("gspo", "objective", "clip_high=inf", "gspo(clip_high=inf)"),
    ("gspo", "objective", "clip_high=1e999", "gspo(clip_high=inf)"),
    ("gspo", "objective", "clip_high=0.3", "gspo(clip_high=0.3)"), ("gspo", "objective", "+ kl(0.01)", "gspo + kl(0.01)"),
    ("gspo", "objective", "clip_high=1e+2 + kl(0.01)", "gspo(clip_high=100.0) + kl(0.01)"),
    ("gspo", "objective", "+ kl(0.01) + entropy(0.1)", "gspo + kl(0.01) + entropy(0.1)")))
def test_the_text_of_a_row_changed_by_that_of_a_configuration(method, key, given, text):
    if text is None:
        with pytest.raises(ValueError, match="Unknown keyword of controller 'dart_curation' or 'dart_lengths' 'longest'"):
            composition.overridden(methods.get(method), key, given)
    else:
        assert composition.overridden(methods.get(method), key, given) == text


def test_a_term_replaces_that_of_the_row_with_its_name():
    row = methods.Method(slug="a", title="", equation="", objective="gspo(clip_high=0.3) + kl(0.1) + entropy(0.2)")
    assert composition.overridden(row, "objective", "clip_low=0.1 + kl(0.4)") == (
        "gspo(clip_high=0.3, clip_low=0.1) + entropy(coef=0.2) + kl(0.4)")


@pytest.mark.parametrize("given, text", (
    ("+ kl(0.4, against=old)", "gspo + kl(coef=0.1) + entropy(coef=0.2) + kl(0.4, against=old)"),  # both stay
    ("+ kl(linear(0.4, 0), estimator=k2)", "gspo + entropy(coef=0.2) + kl(linear(0.4, 0), estimator=k2)"),
    ("+ kl(0) + kl(0.4, against=old)", "gspo + entropy(coef=0.2) + kl(0) + kl(0.4, against=old)"),
    ("+ entropy(0.3, on=expert)", "gspo + kl(coef=0.1) + entropy(coef=0.2) + entropy(0.3, on=expert)")))
def test_a_term_of_another_policy_or_of_other_tokens_is_another_term(given, text):
    row = methods.Method(slug="a", title="", equation="", objective="gspo + kl(0.1) + entropy(0.2)")
    assert composition.overridden(row, "objective", given) == text and texts.faults("objective", text) == []
    old = dataclasses.replace(row, objective="gspo + kl(linear(0.1, 0), against=old)")
    assert composition.overridden(old, "objective", "+ kl(0.3)") == "gspo + kl(coef=linear(0.1, 0), against=old) + kl(0.3)"
    assert composition.overridden(old, "objective", "+ kl(0.3, against=old)") == "gspo + kl(0.3, against=old)"


@pytest.mark.parametrize("given, term", (
    ("regulariser=k2", "+ kl(0.2, estimator='k2', against='old')"), ("regulariser=forward_kl", "+ nll(0.1, on='all')"),
    ("kl_coef=0.3", "+ kl(2 c, estimator='k2', against='old') for k2, + nll(c, on='all') for forward_kl, with 0.3 for c")))
def test_a_former_regulariser_is_named_with_the_term_that_has_its_value(given, term):
    with pytest.raises(ValueError, match=f"objective 'rec_family' has no .*{re.escape(term)}"):
        parts.make_parts(tiny(objective=f"rec_family({given})"), 32)


def test_all_faults_of_all_texts_are_one_error():
    with pytest.raises(ValueError) as raised:
        method_of(tiny(method="grppo", task="arithmetik", rewards="exactt", schedule="synk", estimator="rlo",
                       objective="cispo(max_raito=4) + kl(-1) + kll(0.01)", filters="dynamic", controllers="siri(period=x)",
                       topology="sngle", recorders="teachr", replay="latest_success(sucess=1)", guidance="adhint(high=2)"))
    head, *lines = str(raised.value).splitlines()
    assert head == "14 faults of the composition:"
    for line, (where, what) in zip(lines, (
            ("config.task='arithmetik'", "Did you mean 'arithmetic'?"), ("config.rewards='exactt'", "Did you mean 'exact'?"),
            ("config.schedule='synk'", "Did you mean 'sync'?"), ("config.method='grppo'", "Did you mean 'grpo'?"),
            ("config.estimator='rlo'", "Did you mean 'rloo'?"),
            ("config.objective=", "in cispo(max_raito=4): Unknown keyword of objective 'cispo' 'max_raito'. Did you mean"),
            ("config.objective=", "in kl(-1): term 'kl': coef=-1; give 0 or more, finite"),
            ("config.objective=", "in kll(0.01): Unknown term 'kll'. Did you mean 'kl'?"),
            ("config.filters='dynamic'", "Did you mean 'dynamic_sampling'?"),
            ("config.controllers='siri(period=x)'", "controller 'siri': period='x'; give a number"),
            ("config.replay=", "Did you mean 'success'?"), ("config.guidance='adhint(high=2)'", "high=2; give 0 or more"),
            ("config.topology='sngle'", "Did you mean 'single'?"), ("config.recorders='teachr'", "Did you mean 'teacher'?")),
            strict=True):
        assert line.startswith(f"  {where}") and what in line


def test_a_run_begins_with_these_faults(tmp_path):
    with pytest.raises(ValueError, match="3 faults of the composition:"):
        loop.train(tiny(method="grppo", task="arithmetik", estimator="rlo"), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_no_key_is_none():
    config = tiny(filters=None, method=None)
    for read in (method_of, phases_of):
        with pytest.raises(ValueError, match="config.filters is None; give .* default, ''\n  config.method is None"):
            read(config)


def test_faults_of_one_part_are_said_together_with_those_of_its_terms():
    with pytest.raises(ValueError) as raised:
        method_of(tiny(objective="clip_hig=1, kl_coef=2 + kll(1) + kl(linaer(0, 1))", estimator="grpo(eps=-1, epps=2)"))
    head, *lines = str(raised.value).splitlines()
    assert head == "4 faults of the composition:" and "eps=-1; give 0 or more" in lines[0] and "Did you mean 'eps'" in lines[0]
    for line, what in zip(lines[1:], (r"'clip_high'\? .* has no kl_coef: it is a term", r"in kll.*Did you mean 'kl'\?",
                                      r"in kl.linaer.*Did you mean 'linear'\?"), strict=True):
        assert re.search(what, line)


@pytest.mark.parametrize("changes, message", (
    ({"estimator": "none"}, "every method has an estimator; name one, or leave it empty for the method's own"),
    ({"estimator": "rloo, grpo"}, "'rloo, grpo' names 2 parts; give one estimator"),
    ({"objective": "+"}, "'+' names no term"), ({"objective": "ppo_clip + clip_high=3"}, "cannot read 'clip_high=3'"),
    ({"objective": "ppo_clip(0.1"}, "cannot read 'ppo_clip(0.1'"),
    ({"objective": "kl(0.1)"}, "a loss begins with an objective, and 'kl' is a term; write"),
    ({"objective": "gspo + cispo"}, "in cispo: 'cispo' is a second objective: a loss has one"),
    ({"objective": "gspo +"}, "'gspo +' ends with a sign and names no term"),
    ({"objective": "+ kl(0.1) + kl(0.2)"}, "config.objective='+ kl(0.1) + kl(0.2)': the loss has kl more than once"),
    ({"objective": "+ kl(linear(0.1))"}, "in kl(linear(0.1)): 'linear(0.1)': the schedule linear has the numbers start, end"),
    ({"objective": "+ kl(linear(-0.1, 0))"}, "in kl(linear(-0.1, 0)): term 'kl': coef=-0.1; give 0 or more, finite"),
    ({"objective": "aggregation=linear(0, 1)"}, "numbers alone follow a schedule, and aggregation is 'token_mean'"),
    ({"objective": "dual_clip=linear(2, 3)"}, "config.objective='dual_clip=linear(2, 3)': dual_clip of this objective cannot"),
    ({"estimator": "eps=linear(0, 1)"}, "estimator 'grpo': eps='linear(0, 1)'; give a number"),
    ({"guidance": "adhint(high=half)"}, "topology 'adhint': high='half'; give a number, for example 0.8"),
    ({"stages": "nowhere_to_be:shorter"}, "config.stages='nowhere_to_be:shorter': stage 'nowhere_to_be:shorter': there is"),
    ({"stages": "fractions:Fraction(numerator=3)"}, "fractions:Fraction returned a Fraction; it must return a jaxrl_llm"),
    ({"stages": "shorter"}, "config.stages='shorter': Unknown stage 'shorter'"),
    ({"controllers": "every=5"}, "these are numbers or terms, and method 'grpo' has no controller here; name one of acereason"),
    ({"controllers": "remix, moving_reference", "estimator": "rlo"}, "'remix' and 'moving_reference' both set reference"),
    ({"objective": "clip_low=None"}, "objective 'ppo_clip': clip_low=None; give a number, for example 0.2"),
    ({"objective": "clip_low=-inf"}, "objective 'ppo_clip': clip_low=-inf; give 0 or more"),
    ({"controllers": "siri, siri"}, "'siri, siri' names siri more than once"),
    ({"filters": "dynamic_sampling) + (sws"}, "cannot read 'dynamic_sampling) + (sws'"),
    ({"guidance": "experts(traces=0)"}, "topology 'experts': traces=0; give 1 or more"),
    ({"topology": "single(x=3)"}, "Unknown keyword of topology 'single' 'x'"),
    ({"recorders": "old(3)"}, "more values without a name than the part has numbers: none"),
    ({"estimator": "nowhere_to_be:found"}, "there is no module 'nowhere_to_be' on the path"),
    ({"method": "nowhere_to_be:row"}, "there is no module 'nowhere_to_be' on the path"),
    ({"method": "jaxrl_llm.methods.values:ROW"}, "Unknown row of jaxrl_llm.methods.values 'ROW'")))
def test_compositions_that_are_refused(changes, message):
    config = tiny(**changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        parts.make_parts(config, config.model.hidden_size)


def test_parts_of_ones_own_by_name_at_every_key(own):
    config = tiny(
        estimator="own_parts:credit", objective="own_parts:loss(0.4) + own_parts:term(0.1) + kl(0.01)",
        filters="own_parts:keep(2)", controllers="own_parts:steer(by=3.0), siri", replay="own_parts:store",
        allocation="own_parts:more(8)", guidance="own_parts:begun", topology="own_parts:once", recorders="own_parts:noise")
    made = parts.make_parts(config, config.model.hidden_size)
    assert {"noise", "valid", "ref_logprobs"} <= made.needs
    assert [*made.filters] == ["own_parts:keep"] and made.controls.by_name["own_parts:steer"].init() == 3.0
    assert made.replay.capacity == 64
    assert made.method.part("topology").name == "own_parts:once" and made.method.part("guidance").name == "own_parts:begun"
    found = methods.get("own_parts:row")
    assert found is own.row and methods.lacks(found) == ()
    with pytest.raises(ValueError, match="own_parts:credit returned a Estimator; it must return a jaxrl_llm.control.base.Fil"):
        method_of(tiny(filters="own_parts:credit"))
    with pytest.raises(ValueError, match="Unknown function of own_parts 'lost'. Did you mean 'loss'?"):
        method_of(tiny(objective="own_parts:lost"))


def test_values_of_schedules_in_bases_and_terms():
    config = tiny(objective="cispo + kl(linear(start=0.4, end=0)) + entropy(0.1)", steps=4)
    _, objective = numbers.method_parts(config, method_of(config), 16)
    assert {"ref_logprobs"} <= {*objective.needs} and int(objective.init().updates) == 0


def test_two_numbers_of_a_term_follow_schedules():
    """Each is the other's at its time, and both are metrics."""
    @term
    def floored(*, coef: float, least: float = -5.0) -> Term:
        return Term("floored", coef, lambda logprobs, rollouts: jnp.maximum(least - logprobs, 0))

    try:
        loss = objectives.of("reinforce + floored(linear(0, 1), least=linear(-2, -1))", steps=2)
        rollouts = from_lists([[1.0]], lengths=[[1]])
        state = loss.init()
        for step, wanted in enumerate(((0, -2), (0.5, -1.5))):
            _, (metrics, state) = loss.update(jnp.full((1, 1, 1), -3.0), rollouts, jnp.zeros((1, 1, 1)), state)
            assert (metrics["objective/floored_coef"], metrics["objective/floored_least"]) == wanted, step
    finally:
        TERMS.pop("floored")


def test_the_formula_of_a_composition():
    config = tiny(method="dapo", estimator="rloo", objective="cispo(max_ratio=4) + kl(0.01)")
    assert composition.formula(method_of(config)) == (
        "A = rloo; loss = cispo(max_ratio=4) + kl(0.01); filters = dynamic_sampling")


def test_every_slot_has_its_key_beside_it_and_its_field_in_a_row():
    """A new slot takes an entry and a key in one file, and a field of `Method`."""
    texts.keys(config := ml_collections.ConfigDict())
    assert config.to_dict() == dict.fromkeys(texts.SLOTS, "")
    assert {*texts.SLOTS} <= {field.name for field in dataclasses.fields(methods.Method)}
