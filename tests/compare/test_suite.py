"""Several tasks, one list of methods: gains, ties, and detectable differences."""
import json

import numpy as np
import pytest
from run_folders import started, write_run

from jaxrl_llm import methods
from jaxrl_llm.compare import plan, report, suite
from jaxrl_llm.control import Known
from jaxrl_llm.control.passes import Shares
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.engines.prompts import encode_problems
from jaxrl_llm.evaluation.power import smallest_difference
from jaxrl_llm.setup import names, parts, why
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.setup.meshes import make_mesh
from jaxrl_llm.setup.phases import phases_of
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.tasks.loader import drawn, levels_of, tasks_of
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.tools import written

SEEDS = list(range(8))
NOISE = np.array([0.00, 0.03, -0.02, 0.04, -0.01, 0.01, 0.02, -0.03])
GAINS = {"grpo": 0 * NOISE, "rloo": 0.1 + NOISE, "dapo": NOISE, "dr_grpo": -0.2 + NOISE}  # a gain, a tie, a loss
BUDGET = "steps=4"
COMMAND = "python experiments/compare.py --suite=embedded:mixed"


def write(out, contest, methods, seeds=SEEDS):
    """Finished runs whose final scores differ from those of the first method by `GAINS`."""
    base = suite.config_of(contest)
    budget = plan.read_budget(BUDGET, base)
    entries = plan.read_entries(", ".join(methods), base)
    for job in plan.jobs_of(entries, seeds, budget, out / contest.name / "runs"):
        final = 0.5 + 0.01 * job.seed + GAINS[job.entry.label][SEEDS.index(job.seed)]
        write_run(job, budget, [0.2, 0.3, final], more=None if contest.metric == "eval/score" else {"eval/reward": final - 0.1})
    return entries, budget


def analysed(out, contest, methods=tuple(GAINS), tuning=None):
    entries, budget = write(out, contest, methods)
    results, _ = report.finished_runs(plan.jobs_of(entries, SEEDS, budget, out / contest.name / "runs"), budget)
    return suite.analyse(contest, results, report.analyse(results, budget) | {"tuning": tuning or {}, "command": COMMAND})


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return analysed(tmp_path_factory.mktemp("suite"), suite.contests("embedded")[0])


def test_a_gain_a_loss_and_a_tie(part):
    verdicts = {label: row["difference_at_steps"]["verdict"] for label, row in part["methods"].items() if label != "grpo"}
    assert verdicts == {"rloo": "better", "dapo": "tie", "dr_grpo": "worse"}
    gain = part["methods"]["rloo"]["difference_at_steps"]
    assert gain["mean"] == pytest.approx(0.1 + NOISE.mean()) and gain["p_value"] == 2 / 2**8
    assert gain["adjusted_p"] == pytest.approx(gain["p_value"] * 3 / 2)  # the larger of two equal ones among three


def test_a_lone_difference_can_count_only_with_enough_seeds():
    """Ten others: the correction asks for 0.005 of a difference that stands alone, and nine seeds give 1/256."""
    assert suite.too_few(9, 10) == "" and "needs 0.005: 9 seeds or more" in suite.too_few(8, 10)
    assert suite.too_few(len(suite.SEEDS), len(suite.METHODS.split(",")) - 1) == ""
    for seeds, verdict in ((8, "tie"), (9, "better")):
        even = np.tile([0.01, -0.01], 5)[:seeds]  # the others differ by chance alone
        finals = {"grpo": dict.fromkeys(range(seeds), 0.5), "one": dict(enumerate(np.full(seeds, 0.9))),
                  **{f"other{i}": dict(enumerate(0.5 + even)) for i in range(9)}}
        assert suite._against_first(finals)["one"]["verdict"] == verdict


def test_missing_seeds_are_said_and_break_nothing(part):
    rows = {label: dict(row) for label, row in part["methods"].items()}
    rows["dapo"]["seeds"] = 2
    page = suite.markdown([part | {"methods": rows}])
    assert "| dapo, 2 of 8 seeds |" in page and "8 seeds. With 2 seeds p is at least 0.5, and" in page


def test_methods_without_a_common_seed(tmp_path):
    contest = suite.contests("embedded")[0]
    entries, budget = write(tmp_path, contest, ("grpo",), [0, 1])
    others, _ = write(tmp_path, contest, ("rloo",), [2, 3])
    jobs = [job for each, seeds in ((entries, [0, 1]), (others, [2, 3]))
            for job in plan.jobs_of(each, seeds, budget, tmp_path / contest.name / "runs")]
    results, _ = report.finished_runs(jobs, budget)
    part = suite.analyse(contest, results, report.analyse(results, budget) | {"tuning": {}, "command": COMMAND})
    assert json.dumps(part, allow_nan=False) and "too few seeds" in suite.markdown([part])


@pytest.mark.slow
def test_detectable_differences_follow_from_the_tuning_seeds(tmp_path, part):
    assert part["power_from"] == "testing" and part["visible"] == pytest.approx(
        smallest_difference(part["deviation"], 8, level=0.05 / 3))
    scores = {"grpo": [[0.1, 0.2], [0.4, 0.6]], "rloo": [[0.5, 0.5], [0.1, 0.1]]}
    tuning = {label: {"grid": ["a", "b"], "chosen": chosen, "scores": scores[label]}
              for label, chosen in (("grpo", "b"), ("rloo", "a"))}
    result = analysed(tmp_path, suite.contests("embedded")[0], ("grpo", "rloo"), tuning)
    assert result["power_from"] == "tuning" and result["deviation"] == pytest.approx(np.std([-0.1, 0.1], ddof=1))


def test_the_page_says_when_a_difference_was_known(part):
    after, before = (suite.markdown([part | {"power_from": seeds}]) for seeds in ("testing", "tuning"))
    assert "Computed after the fact, from the spread of paired differences on the testing seeds themselves" in after
    assert "after the fact" not in before and "on the tuning seeds" in before


def test_the_page_says_which_are_ties(part, tmp_path):
    text = suite.markdown([part])
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert list(lines)[2:] == ["rloo", "dapo", "grpo", "dr_grpo"] or list(lines)[2:] == ["rloo", "grpo", "dapo", "dr_grpo"]
    assert "better" in lines["rloo"] and "tie" in lines["dapo"] and "worse" in lines["dr_grpo"]
    assert suite.draw([part, part], tmp_path).stat().st_size > 10_000


@pytest.mark.slow
def test_one_command_renews_the_report_of_all_tasks(tmp_path):
    for contest in suite.contests("embedded"):
        write(tmp_path, contest, ("grpo", "rloo"), SEEDS[:3])
    done = started(tmp_path, "--suite=embedded", "--methods=grpo, rloo", "--seeds=0,1,2", "--grid=",
                           f"--budget={BUDGET}", "--only_report")
    assert done.returncode == 0, done.stderr[-2000:]
    parts = json.loads((tmp_path / "suite.json").read_text())
    assert [part["contest"]["name"] for part in parts] == [contest.name for contest in suite.contests("embedded")]
    assert parts[1]["methods"]["grpo"]["final"] == pytest.approx(0.41)  # the reward, with its cost
    assert (tmp_path / "README.md").is_file() and (tmp_path / "differences.png").is_file()


def test_a_page_keeps_the_tasks_of_earlier_commands(part, tmp_path):
    other = part | {"contest": part["contest"] | {"name": "other"}, "command": "python another.py"}
    for held in ([part], suite.with_part([part], other), suite.with_part([part, other], part | {"seconds": 7.0})):
        suite.write(held, tmp_path)
        assert suite.read(tmp_path) == held
    assert [(one["contest"]["name"], one["seconds"]) for one in held] == [("mixed", 7.0), ("other", part["seconds"])]
    page = (tmp_path / "README.md").read_text()
    assert f"{COMMAND}\npython another.py" in page and "## other" in page


@pytest.mark.slow
@pytest.mark.parametrize("contest", [contest for contests in suite.SUITES.values() for contest in contests],
                         ids=lambda contest: contest.name)
def test_every_task_of_a_suite_takes_every_method_of_the_suite(contest):
    base = suite.config_of(contest)
    for entry in plan.read_entries(suite.METHODS, base):
        plan.check_schedule(entry, plan.read_budget(contest.budget, base))
        judge = make_judge(entry.config)
        made = parts.make_parts(entry.config, 96, judge.task, judge.environment)
        config = resolve(entry.config, methods.get(entry.config.method).defaults)
        why.check(config, made, why.Around(judge.environment, reward=judge.reward))


MIXED = suite.contests("embedded")[0]
STEPS = 104  # of 24 x 8 completions of 6 tokens each, within the budget of MIXED
SWITCHES = {"historical_variance": 1, "oneshot_entropy": 1, "qwenlong_l1": 1, "sws": 1}  # the others: twice or more


def entry_of(method):
    entry, = plan.read_entries(method, suite.config_of(MIXED), suite.SETTINGS)
    return entry


@pytest.fixture(scope="module")
def known():
    """What controllers know of the task of MIXED."""
    train = make_judge(suite.config_of(MIXED)).task.train
    problems = [train[i] for i in range(len(train))]
    lengths = np.array([len(ids) for ids in encode_problems(problems, ByteTokenizer())], np.int32)
    return {"prompts": len(train), "shares": Shares(*tasks_of(train)), "levels": levels_of(train), "prompt_lengths": lengths,
            "seed": np.array([0, 1], np.uint32),
            "embeddings": np.random.default_rng(0).normal(size=(len(train), 4)).astype(np.float32)}


def proposals(entry, known):
    """What the controllers of an entry propose in each step of a run in which the middle third of the problems is learned.

    Every second evaluation is worse than the one before it.
    """
    method = names.method_of(entry.config)
    c = resolve(entry.config, method.defaults)
    P, G, rng, mesh = c.prompts.per_step, c.sampling.group, np.random.default_rng(0), make_mesh(c)
    controls = parts.controls_of(method)
    values = {"params": {}, "temperature": 1.0, "batch": P, "group": G, "max_group": c.sampling.max_group,
              "max_tokens": c.sampling.max_tokens, **known}
    state = controls.init([Known(name, "", lambda value=value: value) for name, value in values.items()])
    starts = np.cumsum([0, *(one.config.steps for one in phases_of(entry.config))])
    for step in range(STEPS):
        if step in starts[1:-1]:
            state = {name: controls.begun(name, own, mesh) for name, own in state.items()}
        knobs = controls.proposed(state)
        yield {name: np.asarray(x) for name, x in knobs.items()}
        weights = np.ones(known["prompts"]) if "prompt_weights" not in knobs else np.asarray(knobs["prompt_weights"])
        ids = drawn(np.array([step]), P, weights) if "prompt_ids" not in knobs else np.array(knobs["prompt_ids"])
        right = rng.random((P, G)) < np.array([0.9, step / STEPS, 0.0])[known["levels"][ids]][:, None]
        tried, solved = (np.zeros(known["prompts"], np.int32) for _ in range(2))
        np.add.at(tried, ids, G)
        np.add.at(solved, ids, right.sum(1))
        facts = {"step": np.int32(step), "tried": tried, "right": solved, "rollouts": Rollouts(
            mask=np.ones((P, G, 1), bool), valid=np.ones((P, G), bool), rewards=right.astype(np.float32),
            prompt_ids=ids.astype(np.int32))}
        if "reference_ids" in knobs:
            asked = np.asarray(knobs["reference_ids"])
            facts["reference_rates"] = np.where(asked < 0, np.nan, rng.random(len(asked))).astype(np.float32)
        state = controls.observe(state, facts, mesh)
        if (step + 1) % c.eval.every == 0:
            state = controls.observe(state, {"score": np.float32(0.5 + 0.1 * (step // c.eval.every % 2))}, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["kimi_sampling", "scalerl"] + [
    name for name, own in suite.SETTINGS.items() if {"controllers", "phases"} & own.keys() and name != "brorl"])
def test_controllers_act_several_times_in_a_run_of_the_suite(method, known):
    given = list(proposals(entry_of(method), known))
    walked = {"prompt_ids", "reference_ids"}  # they differ in every step anyway
    changes = sum(any(not np.array_equal(now[name], before[name]) for name in now.keys() - walked)
                  for before, now in zip(given, given[1:]))
    assert changes >= SWITCHES.get(method, 2)


def test_other_schedules_end_within_a_run_of_the_suite():
    """The shortest runs of the suite have 60 steps: a filter draws three times as many groups as it keeps."""
    for slug, own in suite.SETTINGS.items():
        method = plan.methods.get(slug)
        config = resolve(entry_of(slug).config, method.defaults)
        parts.make_parts(config, config.model.hidden_size)  # and its numbers are known
        numbers = {**written.keywords(own.get("objective", "")), **written.keywords(own.get("estimator", ""))}
        assert sum(numbers.values()) <= 60 and config.critic.pretrain_steps <= 10
    brorl = entry_of("brorl").config
    usual, first = suite.config_of(MIXED), next(proposals(entry_of("brorl"), {"prompts": 3}))
    growth = brorl.prompts.per_step * brorl.sampling.group / (usual.prompts.per_step * usual.sampling.group)
    assert growth == 2 and first["learning_rate"] == pytest.approx(growth**0.5)


def test_settings_of_the_suite_are_printed_and_give_way_to_brackets(part):
    siri, other = plan.read_entries("siri, siri(controllers='period=8')", suite.config_of(MIXED), suite.SETTINGS)
    assert siri.settings == {"controllers": "period=40"} and siri.config.controllers == "period=40"
    assert other.settings == {} and other.config.controllers == "period=8"
    text = suite.markdown([part | {"settings": {**part["settings"], "rloo": {"controllers": "period=40"}}}])
    assert "| rloo (`controllers=period=40`) |" in text and "| dapo |" in text
    assert plan.tuned(siri, {"sampling.group": 4}).settings == siri.settings
    alone, = plan.read_entries("siri(sampling.group=4)", suite.config_of(MIXED), suite.SETTINGS)  # whose label says nothing
    assert (alone.label, alone.settings) == ("siri", {"controllers": "period=40", "sampling.group": 4})


def test_some_tasks_of_a_suite():
    every = suite.contests("embedded")
    assert suite.contests("embedded:tools, mixed") == (every[2], every[0])
    with pytest.raises(ValueError, match="Did you mean 'lengths'"):
        suite.contests("embedded:length")


def test_all_are_those_that_run_by_name():
    result = plan.read_entries("all", suite.config_of(suite.contests("embedded")[0]))
    first, *others = [entry.label for entry in result]
    assert first == "grpo" and sorted([first, *others, "dpo", "otr", "sft"]) == plan.methods.runnable() and len(result) > 80
