"""The text of phases as configurations, and all faults of all phases at once."""
import pytest

from jaxrl_llm.compare import plan
from jaxrl_llm.setup import phases
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.begun import Begun


def made(text, **changes):
    config = default_config()
    config.update_from_flattened_dict({"steps": 100, "sampling.max_tokens": 40, **changes})
    config.phases = text
    return config, phases.phases_of(config)


def test_phases_are_configurations_with_other_keys():
    config, (warm, long) = made("warm(steps=30, task='arithmetic(level=digit)', sampling.temperature=0.6, eval.every=5), "
                                "long(sampling.max_tokens=64, method=dapo, weights=first, fresh='optimizer, reference', "
                                "patience=2, metric=eval/solved, sampling.stop_strings=('.',))")
    assert (warm.name, warm.number, warm.weights, warm.fresh, warm.patience, warm.metric) == (
        "warm", 1, "last", frozenset(), 0, "eval/score")
    assert (warm.config.steps, warm.config.task, warm.config.sampling.temperature, warm.config.eval.every) == (
        30, "arithmetic(level=digit)", 0.6, 5)
    assert (long.config.steps, long.config.method, long.config.sampling.max_tokens) == (70, "dapo", 64)
    assert long.config.eval.every == 10
    assert (long.weights, long.fresh, long.patience, long.metric) == (
        "first", {"optimizer", "reference"}, 2, "eval/solved")
    assert long.config.sampling.stop_strings == (".",) and long.config.phases == ""
    assert (config.sampling.max_tokens, config.steps) == (40, 100)
    assert phases.rows((warm, long), [Begun("warm", 0), Begun("long", 20)]) == [
        ("phase 1 of 2: warm", "steps 1 to 30: task=arithmetic(level=digit), sampling.temperature=0.6, eval.every=5"),
        ("phase 2 of 2: long", "steps 21 to 90 at the latest, 2 evaluations after its best: method=dapo, "
         "sampling.max_tokens=64, weights=first, fresh=optimizer, reference, patience=2, metric=eval/solved, "
         "sampling.stop_strings=('.',)")]


def test_texts_of_parts_need_no_quotes():
    _, (first, second) = made("a(objective=clip_high=0.3 + kl(0.1), filters=none), b(objective='+ kl(0.1)', method=rapo, "
                              "controllers=at_least=3)")
    assert (first.config.objective, first.config.filters) == ("clip_high=0.3 + kl(0.1)", "none")
    assert (second.config.objective, second.config.controllers) == ("+ kl(0.1)", "at_least=3")


@pytest.mark.parametrize("text, steps", (
    ("a, b, c", [33, 33, 34]), ("a(steps=10), b, c", [10, 45, 45]), ("a(steps=25%), b, c(steps=60)", [25, 15, 60]),
    ("a(steps=40), b(steps=60)", [40, 60]), ("alone", [100]),
))
def test_phases_without_a_number_of_steps_share_the_rest(text, steps):
    assert [one.config.steps for one in made(text)[1]] == steps


def test_shares_are_of_the_numbers_of_the_whole_run():
    _, (one,) = made("one(sampling.max_tokens=33%, optimizer.learning_rate=50%)", **{"optimizer.learning_rate": 3e-4})
    assert (one.config.sampling.max_tokens, one.config.optimizer.learning_rate) == (14, 1.5e-4)


def test_keys_of_a_phase_stand_above_those_of_the_paper():
    _, (one, two) = made("one(method=dapo), two(method=dapo, sampling.group=2)", setting="paper")
    assert (one.config.sampling.group, two.config.sampling.group, two.config.setting) == (16, 2, "")


def test_all_faults_of_all_phases_are_said_at_once():
    text = ("a(weights=last, optimiser.learning_rate=1, lr=2), b(model.path=x, sampling.max_tokens=many, steps=0), "
            "b(weights=middle, fresh=optimiser, patience=-1), c d, e(method=dapo, method=grpo), "
            "f(patience=2, eval.every=0, sampling.group)")
    with pytest.raises(ValueError) as caught:
        made(text)
    said = str(caught.value)
    for fault in (
        "two phases are named 'b'; give each a name of its own",
        "phase 'a': the configuration has no key 'optimiser.learning_rate'; near: optimizer.learning_rate",
        "phase 'a': the configuration has no key 'lr'; near: ",
        "the words of a phase beside its keys are weights, fresh, patience, metric",
        "phase 'a' is the first: no phase before it left weights, and everything begins with it; leave weights out of it",
        "phase 'b': model.path is of the whole run, whose weights, devices and records its phases share",
        "phase 'b': config.sampling.max_tokens='many': it is 40 here, of type int", "phase 'b': steps=0; give 1 or more",
        "phase 'b': Unknown weights 'middle'. Allowed: first, last.",
        "phase 'b': Unknown fresh 'optimiser'. Did you mean 'optimizer'?",
        "phase 'b': patience=-1; give a number of evaluations", "cannot read 'c d'; write name, or name(key=value, key=value)",
        "phase 'e': cannot read 'method=grpo'; write key=value, each key once",
        "phase 'f': patience=2 ends it by its evaluations, and eval.every=0 leaves out all but the last",
        "phase 'f': cannot read 'sampling.group'",
    ):
        assert fault in said, fault


@pytest.mark.parametrize("text, fault", (
    ("a(steps=30), b(steps=50)", "the phases have 80 steps together, and config.steps is 100; set config.steps=80, or"),
    ("a(steps=100), b", "config.steps=100 leaves 0 for the phases without a number of steps, b; each needs one or more"),
    ("a(steps=2.5), b", "config.steps=2.5: it is 100 here, of type int"),
    ("a(steps=True), b", "config.steps=True: it is 100 here, of type int"),
    ("a(phases='b')", "phases is of the whole run"),
    ("a, b(metric=eval/score)", "phase 'b': metric=eval/score counts for patience alone; set patience, or leave it out"),
    ("a(task='arithmetic)", "phase 'a': cannot read task='arithmetic; texts with spaces or signs stand in quotes"),
    ("a, b(method=sws)", "phase 'b': method 'sws' has phases of its own, 'first, second(weights=first)'; write these here"),
))
def test_steps_words_and_nested_phases(text, fault):
    with pytest.raises(ValueError, match="config.phases=.a") as caught:
        made(text)
    assert fault in str(caught.value)


def test_numbers_of_steps_that_cannot_be_are_not_added_up():
    with pytest.raises(ValueError, match="phase 'b': steps=-40; give 1 or more$"):
        made("a(steps=100), b(steps=-40)")


@pytest.mark.parametrize("scores, stalled", (
    ([], False), ([0.5], False), ([0.5, 0.5], False), ([0.5, 0.5, 0.4], True), ([0.1, 0.2, 0.3], False),
    ([0.1, 0.4, 0.3, float("nan")], True), ([0.1, 0.4, 0.3, 0.41, 0.2], False),
))
def test_a_phase_ends_when_its_best_score_is_old(scores, stalled):
    _, (one,) = made("one(patience=2)")
    assert one.stalled(scores) == stalled
    assert not made("one")[1][0].stalled(scores)


def test_the_configuration_of_the_phases_that_have_begun():
    config, (warm, _) = made("warm(steps=30, method=dapo), long")
    assert phases.at(config, [Begun("warm", 0)]).to_dict() == warm.config.to_dict()
    assert phases.at(config, [Begun("warm", 0), Begun("long", 30)]).method == "grpo"
    with pytest.raises(ValueError, match="Unknown phase of config.phases 'longer'. Did you mean 'long'"):
        phases.at(config, [Begun("warm", 0), Begun("longer", 30)])
    assert phases.recorded(config).learner.epochs == 0, "each phase resolves it by its own method"
    config.phases = ""
    assert phases.at(config, []) is config and phases.recorded(config).learner.epochs == 1


@pytest.mark.parametrize("text, follow", (
    ("", False), ("all", False), ("a(steps=5), b", False), ("a, b", True), ("a(steps=50%), b", True),
    ("a(steps=5), b(steps=5)", True),
))
def test_budgets_in_other_units_leave_the_number_of_steps_open(text, follow):
    """The last phase has what is left of a run that a budget of tokens ends, and the others have numbers of steps."""
    assert phases.follows_steps(text) == follow
    config = default_config()
    config.phases = text
    entry, = plan.read_entries("rloo", config)
    budget = plan.read_budget("tokens=1e5", config)
    if follow:
        with pytest.raises(ValueError, match="rloo: phases='.*' needs the number of steps, which a budget in"):
            plan.check_schedule(entry, budget)
    else:
        plan.check_schedule(entry, budget)


def test_steps_of_a_comparison_are_shared_out_before_any_run():
    config = default_config()
    config.phases = "a(steps=5), b(steps=5)"
    entry, = plan.read_entries("rloo", config)
    plan.check_schedule(entry, plan.Budget("steps", 10))
    with pytest.raises(ValueError, match="rloo: config.phases=.*\n  the phases have 10 steps together, and config.steps is 12"):
        plan.check_schedule(entry, plan.Budget("steps", 12))


def test_the_parts_of_each_phase_are_recorded_by_key(tmp_path, monkeypatch):
    (tmp_path / "own_row_of_parts.py").write_text(
        "from jaxrl_llm.methods import Method\n\nrow = Method(slug='own', title='', equation='', objective='gspo')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = default_config()
    config.method = "own_row_of_parts:row"
    found = phases.parts_of(config)
    assert (found["objective"], found["estimator"], found["filters"]) == ("gspo", "grpo", "")
    config.phases = "warm(steps=5, estimator=rloo), long"
    found = phases.parts_of(config)
    assert (found["warm.estimator"], found["long.estimator"], found["long.objective"]) == ("rloo", "grpo", "gspo")
