"""Methods, grids and budgets as text, and refusals before any run."""
import contextlib
import importlib.util
import sys

import numpy as np
import pytest
from run_folders import base, write_run

from jaxrl_llm.compare import launch, plan
from jaxrl_llm.setup.check import check
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.store import lock


def test_entries_carry_their_overrides_and_leave_the_base_alone():
    config = base()
    grpo, rloo = plan.read_entries(
        "grpo, rloo(sampling.group=8, optimizer.learning_rate=1e-3, objective='aggregation=token_mean')", config)
    assert (grpo.label, grpo.config.method, grpo.config.sampling.group) == ("grpo", "grpo", 2)
    assert (rloo.config.method, rloo.config.sampling.group, rloo.config.optimizer.learning_rate) == ("rloo", 8, 1e-3)
    assert rloo.config.objective == "aggregation=token_mean"
    assert rloo.name == "rloo_sampling.group=8_optimizer.learning_rate=1e-3_objective=_aggregation=token_mean"
    assert config.method == "grpo" and config.sampling.group == 2
    assert rloo.label == "rloo" and rloo.text.startswith("rloo(sampling.group=8")
    same = plan.read_entries("grpo, grpo(sampling.group=8), rloo(sampling.group=8)", config)
    assert [entry.label for entry in same] == ["grpo", "grpo(sampling.group=8)", "rloo"]
    alike = plan.read_entries("v0(sampling.group=8, prior.source='probe'), v0(sampling.group=8, prior.source='oracle')", config)
    assert [entry.label for entry in alike] == ["v0(prior.source='probe')", "v0(prior.source='oracle')"]
    assert [entry.settings for entry in alike] == [{"sampling.group": 8}] * 2  # what the labels do not say
    same_values = plan.read_entries("grpo(optimizer.clip_norm=1), grpo(optimizer.clip_norm=1.0)", config)
    assert [entry.label for entry in same_values] == ["grpo(optimizer.clip_norm=1)", "grpo(optimizer.clip_norm=1.0)"]


@pytest.mark.parametrize("text, message", (
    ("gropo", "Did you mean 'grpo'"),
    ("grpo(sampling.grup=8)", "no key 'sampling.grup'; near: sampling.group"),
    ("grpo(lr=1e-3)", "no key 'lr'; near: .*optimizer.learning_rate"),
    ("grpo(sampling.group=many)", "config.sampling.group='many': it is 2 here, of type int"),
    ("grpo(sampling.group)", "write key=value"),
    ("grpo(steps=1, steps=2)", "each key once"),
    ("grpo rloo", "write method, or method"),
    ("grpo, rloo, grpo", "grpo would share a folder"),
    ("grpo, rloo(eval.problems=7)", "eval.problems differs (64 of grpo, 7 of rloo"),
    ("", "no methods to compare"),
    ("grpo(estimator=rlo)", "grpo.estimator=rlo.: config.estimator='rlo': Unknown estimator 'rlo'. Did you mean 'rloo'"),
    ("grpo(task=one + two)", "task=one . two.: cannot read 'one . two'; write text with spaces or signs in quotes"),
    ("grpo, nowhere_to_be:row", "nowhere_to_be:row: config.method='nowhere_to_be:row': .*there is no module"),
))
def test_entries_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        plan.read_entries(text, base())


def test_compositions_are_contestants_with_readable_labels():
    """Texts of parts need no quotes, in the list and in the label; the name of a long one as a folder ends in a hash."""
    named = plan.read_entries("grpo, grpo(objective=cispo(max_ratio=4) + kl(0.01), filters=dynamic_sampling), "
                              "grpo(estimator='rloo'), siri(controllers=none)", base())
    assert [entry.label for entry in named] == [
        "grpo", "grpo(objective=cispo(max_ratio=4) + kl(0.01), filters=dynamic_sampling)", "grpo(estimator=rloo)", "siri"]
    changed = plan.read_entries("grpo(objective=clip_high=0.3 + kl(0.1)), grpo(objective='+ kl(0.1)'), "
                                "rapo(controllers=at_least=3)", base())
    assert [entry.label for entry in changed] == [
        "grpo(objective=clip_high=0.3 + kl(0.1))", "grpo(objective=+ kl(0.1))", "rapo"]
    assert [entry.config.objective for entry in changed] == ["clip_high=0.3 + kl(0.1)", "+ kl(0.1)", ""]
    assert changed[2].config.controllers == "at_least=3"
    assert named[1].config.objective == "cispo(max_ratio=4) + kl(0.01)" and named[1].config.filters == "dynamic_sampling"
    assert named[1].name == "grpo_objective=cispo_max_ratio=4_+_kl_0.01_filters=dynamic_sampling"
    long, other = plan.read_entries(
        ", ".join(f"grpo(objective=ppo_clip(clip_low=0.2, aggregation=seq_mean_token_mean, dual_clip=10.0) + kl(0.001) + "
                  f"entropy(0.0005) + nll({coef}), filters=dynamic_sampling)" for coef in (0.28, 0.3)), base())
    assert len(long.name) == len(other.name) == 113 and long.name[:100] == other.name[:100] and long.name != other.name


def test_random_search_begins_as_configured_and_stays_in_its_space():
    text = "optimizer.learning_rate=1e-5..1e-2, sampling.group=8|16"
    drawn = plan.draw_settings(text, 200)
    assert drawn == plan.draw_settings(text, 200) and drawn[0] == {} and len(drawn) == 200
    rates = np.log10([one["optimizer.learning_rate"] for one in drawn[1:]])
    assert rates.min() >= -5 and rates.max() <= -2 and abs(rates.mean() + 3.5) < 0.2
    assert {one["sampling.group"] for one in drawn[1:]} == {8, 16}
    assert plan.draw_settings(text, 5) == drawn[:5]  # further trials continue this sequence


@pytest.mark.parametrize("call, message", (
    (lambda: plan.read_grid("optimizer.learning_rate=1e-5..1e-2"), "is a range, of which --trials=N draws points"),
    (lambda: plan.draw_settings("optimizer.learning_rate=1e-2..1e-5", 2), "0 < low < high"),
    (lambda: plan.draw_settings("optimizer.learning_rate=0..1", 2), "0 < low < high"),
))
def test_spaces_that_cannot_be_searched(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_grid_is_every_combination():
    assert plan.read_grid("optimizer.learning_rate=1e-4|3e-4, sampling.group=8|16") == [
        {"optimizer.learning_rate": 1e-4, "sampling.group": 8}, {"optimizer.learning_rate": 1e-4, "sampling.group": 16},
        {"optimizer.learning_rate": 3e-4, "sampling.group": 8}, {"optimizer.learning_rate": 3e-4, "sampling.group": 16}]


def test_budgets():
    assert plan.read_budget("tokens=2e6", base()) == ("tokens", 2e6)
    assert plan.read_budget("", base()) == ("steps", 4)
    for text, message in (("token=3", "Did you mean 'tokens'"), ("steps=2.5", "whole"), ("seconds=0", "above 0"),
                          ("seconds=5, steps=3", "one unit"), ("seconds=long", "above 0")):
        with pytest.raises(ValueError, match=message):
            plan.read_budget(text, base())
    entry, = plan.read_entries("grpo", base(**{"optimizer.schedule": "cosine"}))
    plan.check_schedule(entry, plan.Budget("steps", 10))
    with pytest.raises(ValueError, match="'cosine' needs the number of steps"):
        plan.check_schedule(entry, plan.Budget("tokens", 10))
    annealed, own = plan.read_entries("grpo(objective='+ kl(linear(start=0.1, end=0))'), "
                                      "grpo(objective='+ kl(linear(start=0.1, end=0, steps=9))')", base())
    plan.check_schedule(annealed, plan.Budget("steps", 10))
    plan.check_schedule(own, plan.Budget("tokens", 10))
    with pytest.raises(ValueError, match="objective's linear.* of kl needs the number of steps"):
        plan.check_schedule(annealed, plan.Budget("tokens", 10))
    blind, = plan.read_entries("grpo", base(**{"eval.every": 0}))
    plan.check_schedule(blind, plan.Budget("steps", 10))
    with pytest.raises(ValueError, match="eval.every=0 has no evaluation after which"):
        plan.check_schedule(blind, plan.Budget("tokens", 10))


def test_a_grid_replaces_nothing_in_brackets():
    entry, = plan.read_entries("grpo(optimizer.learning_rate=1e-5)", base())
    with pytest.raises(ValueError, match="optimizer.learning_rate is in --grid too"):
        plan.tuned(entry, {"optimizer.learning_rate": 1e-4})
    assert plan.tuned(entry, {"sampling.group": 4}).config.sampling.group == 4


def test_jobs_come_seed_by_seed(tmp_path):
    jobs = plan.jobs_of(plan.read_entries("grpo, rloo", base()), [3, 5], plan.Budget("steps", 2), tmp_path)
    assert [(job.entry.label, job.seed) for job in jobs] == [("grpo", 3), ("rloo", 3), ("grpo", 5), ("rloo", 5)]
    assert jobs[2].folder == tmp_path / "grpo" / "seed5" and jobs[2].title == "grpo seed 5"


def test_shares_are_a_partition(tmp_path):
    jobs = plan.jobs_of(plan.read_entries("grpo, rloo", base()), [0, 1, 2], plan.Budget("steps", 2), tmp_path)
    parts = [plan.share(jobs, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(jobs.index(job) for part in parts for job in part) == list(range(6)) and plan.share(jobs, "1/1") == jobs
    for wrong in ("0/4", "5/4", "half"):
        with pytest.raises(ValueError, match="part/parts"):
            plan.share(jobs, wrong)


def test_runs_at_a_time_share_the_memory_of_a_gpu(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    assert name not in launch.environment(1) and launch.environment(4)[name] == "0.23"
    monkeypatch.setenv(name, "0.1")
    assert launch.environment(4)[name] == "0.1"


def test_an_error_of_the_launcher_leaves_no_run_behind(tmp_path, monkeypatch):
    """A closed pipe, for instance: the process of a run would train on, and nobody would end it."""
    budget, started = plan.Budget("steps", 4), []
    job, = plan.jobs_of(plan.read_entries("grpo", base()), [0], budget, tmp_path)
    monkeypatch.setattr(launch, "command", lambda job, options: [sys.executable, "-c", "import time; time.sleep(600)"])
    start = launch._start
    monkeypatch.setattr(launch, "_start", lambda *given: started.append(start(*given)) or started[-1])

    def closed(text):
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError) as caught:
        launch.run_all([job], budget, say=closed)
    assert started[0].poll() is not None and caught.value.__notes__ == ["the same command continues from here"]


def test_a_run_that_is_still_ending_is_waited_for(tmp_path, monkeypatch):
    """A run of a killed comparison has its folder until it has saved; the other job is not held up by it."""
    budget, seen, events = plan.Budget("steps", 4), [], contextlib.ExitStack()
    jobs = plan.jobs_of(plan.read_entries("grpo", base()), [0, 1], budget, tmp_path)
    monkeypatch.setattr(launch, "command", lambda job, options: [sys.executable, "-c", "raise SystemExit(3)"])
    events.enter_context(lock.locked(jobs[0].folder))
    assert [lock.is_locked(job.folder) for job in jobs] == [True, False]

    def say(text):
        seen.append(text.strip().split(",")[0])
        if "seed 1: FAILED" in text:
            events.close()  # the earlier run ends

    assert launch.run_all(jobs, budget, say=say, poll=0.01) == [jobs[1], jobs[0]]
    assert seen == ["waiting for runs of an earlier comparison to save their last step and end: grpo seed 0",
                    "[1/2] grpo seed 1: started", "grpo seed 1: FAILED with exit code 3: no log",
                    "[2/2] grpo seed 0: started", "grpo seed 0: FAILED with exit code 3: no log"]


def test_a_written_configuration_reads_back(tmp_path):
    entries = plan.read_entries("dapo(sampling.stop_strings=('a', 'b'))", base())
    budget = plan.Budget("steps", 7)
    job, = plan.jobs_of(entries, [3], budget, tmp_path)
    plan.write_config(job, budget)
    spec = importlib.util.spec_from_file_location("written", job.config_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result, wanted = module.get_config(), plan.changed(entries[0].config, {"steps": 7, "seed": 0, "checkpoint.every": 10})
    assert result.to_dict() == wanted.to_dict() and result.is_locked
    assert result.sampling.stop_strings == ("a", "b")
    assert plan.run_config(job, plan.Budget("tokens", 7.0)).steps == plan.ENDLESS
    check(resolve(result, {}))


def test_a_folder_of_other_settings_is_refused(tmp_path):
    budget = plan.Budget("steps", 4)
    job, = plan.jobs_of(plan.read_entries("grpo", base()), [0], budget, tmp_path)
    write_run(job, budget, [0.1, 0.2])
    plan.check_folder(job, budget)
    plan.check_folder(job, plan.Budget("tokens", 1e5))  # another number of steps is the same run, continued
    other, = plan.jobs_of(plan.read_entries("grpo", base(**{"sampling.group": 4})), [0], budget, tmp_path)
    with pytest.raises(ValueError, match="sampling.group: 2 -> 4"):
        plan.check_folder(other, budget)


def test_a_schedule_over_other_steps_is_another_run(tmp_path):
    budget = plan.Budget("steps", 4)
    job, = plan.jobs_of(plan.read_entries("grpo", base(**{"optimizer.schedule": "linear"})), [0], budget, tmp_path)
    write_run(job, budget, [0.1, 0.2])
    plan.check_folder(job, budget)
    with pytest.raises(ValueError, match="steps: 4 -> 8"):
        plan.check_folder(job, plan.Budget("steps", 8))
