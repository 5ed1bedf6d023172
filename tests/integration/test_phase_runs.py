"""Runs in phases: killed at a boundary and within a phase, what carries over, early ends, exports, pages and refusals."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_config
from run_files import assert_same, left_behind, lines, repeatable

from jaxrl_llm.compare.ledger import read_run
from jaxrl_llm.models import weights
from jaxrl_llm.runs import loop, phases, trained
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.phases import phases_of
from jaxrl_llm.setup.stored import stored_config, whole_config
from jaxrl_llm.show.page import write_page
from jaxrl_llm.show.runs import read_runs
from jaxrl_llm.store.checkpoints import Checkpoints

THREE = ("warm(steps=4), long(steps=4, fresh='optimizer, reference', sampling.max_tokens=5, task='arithmetic(level=sub2)'), "
         "last(weights=first, learner.epochs=2)")


def tiny(text, **changes):
    config = tiny_config.get_config()
    config.phases = text
    config.update_from_flattened_dict({"steps": 12, "objective": "+ kl(0.1)", "optimizer.learning_rate": 3e-2, **changes})
    return config


def states(workdir, config, step):
    """The leaves of a checkpoint by name, and what is stored beside it."""
    number = [one["start"] < step for one in json.loads((workdir / "phases.json").read_text())["phases"]].count(True)
    run, params = setup.build(phases_of(config)[max(number, 1) - 1].config)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        found = checkpoints.restore(setup.initial_state(run, params), step)
    state = found.state.replace(key=jax.random.key_data(found.state.key))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}, found.host


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight") / "run"
    return workdir, left_behind(tiny(THREE), workdir, phase="long")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is on a new branch")
def test_a_run_killed_at_a_boundary_and_within_a_phase_ends_like_an_uninterrupted_one(straight):
    first, config = straight[0].with_name("run-long"), tiny(THREE)
    assert [one["name"] for one in json.loads((first / "phases.json").read_text())["phases"]] == ["warm", "long"]
    left_behind(config, first, resume=True, step=10)
    second = first.with_name("run-long-10")
    assert lines(second)[-1]["step"] == 10  # it has the checkpoint of step 9, one step after the last phase began
    assert {*loop.train(config, second, resume=True)} == {"after"}
    for workdir in (first, second):
        for step in (9, 12):
            (state, host), (wanted, wanted_host) = states(workdir, config, step), states(straight[0], config, step)
            assert_same(state, wanted)
            assert host == wanted_host
        assert [repeatable(line) for line in lines(workdir)] == [repeatable(line) for line in lines(straight[0])]
        for name in ("phases.json", "samples/step_000006.txt", "samples/step_000012.jsonl",
                     "phases/last/samples/step_000008.txt"):
            assert (workdir / name).read_text() == (straight[0] / name).read_text()


@pytest.mark.slow
def test_one_record_with_all_phases(straight):
    workdir, evaluations = straight
    told = lines(workdir)
    assert [line["step"] for line in told] == list(range(13))
    assert [line["phase"] for line in told] == [1] * 5 + [2] * 4 + [3] * 4
    assert list(evaluations) == ["before", "after warm", "before long", "after long", "before last", "after"]
    assert json.loads((workdir / "phases.json").read_text())["phases"] == [
        {"name": "warm", "start": 0}, {"name": "long", "start": 4}, {"name": "last", "start": 8}]
    assert [line["step"] for line in told if "start/eval/score" in line] == [5, 9] and "eval/score" in told[4]
    assert told[5]["start/eval/score"] == evaluations["before long"].score.mean
    assert evaluations["before long"].length <= 5 < evaluations["before last"].length, "by the limits of each phase"
    for phase, step in (("long", 4), ("last", 8)):
        pages = [folder / f"samples/step_{step:06}.jsonl" for folder in (workdir, workdir / "phases" / phase)]
        prompts = [{json.loads(row)["prompt"] for row in page.read_text().splitlines()} for page in pages]
        assert all(prompts) and not prompts[0] & prompts[1], "problems of another task"
    rates = [line["learning_rate"] for line in told[1:]]  # each phase warms up for two updates
    assert rates == pytest.approx([1.5e-2, 3e-2, 3e-2, 3e-2] * 2 + [3e-2] * 4)
    assert told[4]["kl"] > 1e-3 and told[5]["kl"] == pytest.approx(0, abs=1e-6), "the reference is the policy of step 4"
    assert max(line["completion/length"] for line in told[5:9]) <= 5 < told[9]["completion/length"]


@pytest.mark.slow
def test_the_last_phase_begins_with_the_first_weights(straight):
    initial = setup.initial_state(*setup.build(phases_of(tiny(THREE))[0].config))
    with Checkpoints(straight[0] / "first", read_only=True) as store:
        kept = store.restore(initial.params, 0).state
    jax.tree.map(np.testing.assert_array_equal, kept, initial.params)
    nine, _ = states(straight[0], tiny(THREE), 9)
    moved = np.abs(nine[".params['embed']"] - np.asarray(initial.params["embed"])).max()
    assert 0 < moved < 0.1 and nine[".step"] == 1  # two updates of at most 0.03


@pytest.mark.slow
def test_exports_pages_and_comparisons_of_a_run_in_phases(straight, tmp_path):
    workdir, _ = straight
    run = trained.trained(workdir)
    assert (run.step, run.config.sampling.max_tokens, run.config.task) == (12, 6, "arithmetic(level=digit)")
    assert stored_config(workdir, 8).task == "arithmetic(level=sub2)" and stored_config(workdir, 8).sampling.max_tokens == 5
    assert stored_config(workdir, 4).task == stored_config(workdir, 9).task == "arithmetic(level=digit)"
    assert whole_config(workdir).phases == THREE
    assert trained.export(workdir, tmp_path / "model") == 12
    np.testing.assert_array_equal(weights.load(tmp_path / "model")[1]["embed"], run.params["embed"])
    (shown,) = read_runs([workdir])
    assert shown.facts["phases"] == "warm 1 to 4, long 5 to 8, last 9 to 12" and shown.facts["steps"] == "12 of 12"
    page = write_page([shown], tmp_path / "page.html").read_text()
    assert page.count('class="mark" stroke') == 3 * page.count("<svg") and ">long</text>" in page
    told = read_run(workdir)
    assert told.spent["tokens"].tolist() == np.cumsum([line.get("completion/tokens", 0) for line in lines(workdir)]).tolist()
    flops = np.diff(told.spent["flops"])
    assert flops[8:].min() > 1.5 * flops[:8].max(), "two epochs cost more than one"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:resuming")
def test_a_phase_ends_early_and_another_is_added(tmp_path):
    """No score of an evaluation rises where nothing is learned: the first phase ends two evaluations after the first."""
    text = "flat(steps=8, patience=2, eval.every=1, optimizer.learning_rate=0.0), rest(steps=2)"
    loop.train(tiny(text, steps=10), tmp_path)
    told = lines(tmp_path)
    best = int(np.argmax([line["eval/score"] for line in told if line["phase"] == 1]))
    ended = [line["step"] for line in told if line["phase"] == 1][-1]
    assert ended == best + 2 < 8 and told[-1]["step"] == ended + 2
    begun = [{"name": "flat", "start": 0}, {"name": "rest", "start": ended}]
    assert json.loads((tmp_path / "phases.json").read_text())["phases"] == begun
    loop.train(tiny(text + ", more(steps=1)", steps=11), tmp_path, resume=True)
    assert lines(tmp_path)[-1]["step"] == ended + 3 and lines(tmp_path)[-1]["phase"] == 3
    with pytest.raises(ValueError, match="went through the phases flat, rest, more, and config.phases begins with flat, other"):
        loop.train(tiny("flat(steps=8), other(steps=2)", steps=10), tmp_path, resume=True)


@pytest.mark.slow
def test_what_a_phase_takes_over():
    """Moments and records of problems go on; what is fresh, of other problems or learned before a fresh start begins anew."""
    text = "a, b, c(fresh=optimizer), d(weights=first), e(learner.max_skipped=7)"
    _, *others = phases_of(tiny(text, steps=5, method="historical_variance", objective=""))
    run, params = setup.build(others[0].config)
    state = setup.initial_state(run, params)
    steps = run.schedule.steps(run.source, run.learner, state, run.learner.frozen(state.params))
    for _ in range(2):
        last = next(steps).learned.state
    last = jax.device_get(last.replace(key=jax.random.key_data(last.key)))

    def taken(phase, same=True):
        again = jax.tree.map(jnp.array, last)
        key = jax.random.wrap_key_data(again.key)
        return phases.carried(run, again.replace(key=key), phase, same)

    def moments(found):
        return float(sum(np.abs(x).sum() for x in jax.tree.leaves(optax.tree.get(found.opt_state, "mu"))))

    known = {name: taken(phase) for name, phase in zip("bcde", others)}
    had = moments(last)
    assert had > 0 and moments(known["b"]) == moments(known["e"]) == had and moments(known["c"]) == moments(known["d"]) == 0
    for name, found in known.items():
        visits = found.control["historical_variance"]
        assert int(visits.times.sum()) == 8 and int(visits.chosen) >= 0, name
        assert int(found.step) == 0
        jax.tree.map(np.testing.assert_array_equal, found.params, last.params)
    keys = {tuple(np.asarray(jax.random.key_data(found.key)).tolist()) for found in known.values()}
    assert len(keys | {tuple(last.key.tolist())}) == 5, "each phase has random draws of its own"
    other = taken(others[0], same=False)
    assert int(other.control["historical_variance"].times.sum()) == 0 and moments(other) == had


@pytest.mark.slow
def test_a_phase_takes_over_the_states_of_replayed_batches():
    """The multiplier of R2VPO's loss on stored rollouts, as that on fresh ones."""
    text = "a, b, c(weights=first)"
    config = tiny(text, method="spear", objective="r2vpo", replay_objective="r2vpo", **{"model.num_layers": 1})
    _, b, c = phases_of(config)
    run, params = setup.build(b.config)
    state = setup.initial_state(run, params)
    moved = jax.tree.map(lambda leaf: leaf + 1, (state.objective_state, state.replayed))
    assert len(jax.tree.leaves(moved)) == 2
    for phase, wanted in ((b, moved), (c, (state.objective_state, state.replayed))):
        found = phases.carried(run, state.replace(objective_state=moved[0], replayed=moved[1]), phase, same=True)
        jax.tree.map(np.testing.assert_array_equal, (found.objective_state, found.replayed), wanted)


def test_faults_of_all_phases_come_before_the_first_step(tmp_path):
    text = "a, b(task='arithmetic(level=x)'), c(method=gpro), d(sampling.top_p=2.0), e(patience=1, metric=eval/scores)"
    with pytest.raises(ValueError) as caught:
        loop.train(tiny(text), tmp_path / "run")
    for fault in ("phase 'b': Unknown arithmetic level 'x'", "phase 'c': ", "Unknown method 'gpro'. Did you mean 'grpo'",
                  "phase 'd': config.sampling.top_p is 2.0",
                  "phase 'e': Unknown metric 'eval/scores'. Did you mean 'eval/score'"):
        assert fault in str(caught.value), fault
    assert not list((tmp_path / "run").glob("checkpoints*")) and not (tmp_path / "run/config.json").exists()


@pytest.mark.slow
def test_the_example_that_a_first_run_chooses_is_alone_in_the_second(tmp_path):
    """One phase over all problems, then a fresh start with the one of largest variance: the row `historical_variance`."""
    config = tiny("", method="historical_variance", objective="", steps=5, **{"eval.every": 5})
    loop.train(config, tmp_path)
    assert whole_config(tmp_path).phases == "all, one(weights=first)"
    two = phases_of(whole_config(tmp_path))[1].config
    run, params = setup.build(two)
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        found = checkpoints.restore(setup.initial_state(run, params)).state
    visits = found.control["historical_variance"]
    chosen = int(np.argmax(np.asarray(visits.squares) / np.maximum(np.asarray(visits.times), 1)))
    assert int(visits.chosen) == chosen and int(visits.times.sum()) == 2 * 4, "only the two steps of the first phase count"
    assert int(found.step) == 3
    page = (tmp_path / "samples/step_000004.jsonl").read_text().splitlines()
    prompts = {json.loads(row)["prompt"] for row in page}
    assert len(prompts) == 1 and prompts.pop().endswith(run.source.task.train[chosen].prompt)
