"""Several tasks, one list of methods: gains, ties, and detectable differences."""
import json

import numpy as np
import pytest
from run_folders import started, write_run

from jaxrl_llm.compare import plan, report, suite
from jaxrl_llm.environments.runner import Runner
from jaxrl_llm.evaluation.power import smallest_difference
from jaxrl_llm.training import parts, refusals, setup

SEEDS = list(range(8))
NOISE = np.array([0.00, 0.03, -0.02, 0.04, -0.01, 0.01, 0.02, -0.03])
GAINS = {"grpo": 0 * NOISE, "rloo": 0.1 + NOISE, "dapo": NOISE, "dr_grpo": -0.2 + NOISE}  # a gain, a tie, a loss
BUDGET = "steps=4"


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
    return suite.analyse(contest, results, report.analyse(results, budget) | {"tuning": tuning or {}})


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    return analysed(tmp_path_factory.mktemp("suite"), suite.contests("embedded")[0])


def test_a_gain_a_loss_and_a_tie(part):
    verdicts = {label: row["difference_at_steps"]["verdict"] for label, row in part["methods"].items() if label != "grpo"}
    assert verdicts == {"rloo": "better", "dapo": "tie", "dr_grpo": "worse"}
    gain = part["methods"]["rloo"]["difference_at_steps"]
    assert gain["mean"] == pytest.approx(0.1 + NOISE.mean()) and gain["p_value"] == 2 / 2**8
    assert gain["adjusted_p"] == pytest.approx(gain["p_value"] * 3 / 2)  # the larger of two equal ones among three
    assert part["smallest_p"] == 2 / 2**8


def test_detectable_differences_follow_from_the_tuning_seeds(tmp_path, part):
    assert part["power_from"] == "testing" and part["visible"] == pytest.approx(smallest_difference(part["deviation"], 8))
    scores = {"grpo": [[0.1, 0.2], [0.4, 0.6]], "rloo": [[0.5, 0.5], [0.1, 0.1]]}
    tuning = {label: {"grid": ["a", "b"], "chosen": chosen, "scores": scores[label]}
              for label, chosen in (("grpo", "b"), ("rloo", "a"))}
    result = analysed(tmp_path, suite.contests("embedded")[0], ("grpo", "rloo"), tuning)
    assert result["power_from"] == "tuning" and result["deviation"] == pytest.approx(np.std([-0.1, 0.1], ddof=1))


def test_the_page_says_which_are_ties(part, tmp_path):
    text = suite.markdown([part], "python experiments/compare.py --suite=embedded")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert list(lines)[2:] == ["rloo", "dapo", "grpo", "dr_grpo"] or list(lines)[2:] == ["rloo", "grpo", "dapo", "dr_grpo"]
    assert "better" in lines["rloo"] and "tie" in lines["dapo"] and "worse" in lines["dr_grpo"]
    assert suite.draw([part, part], tmp_path).stat().st_size > 10_000


@pytest.mark.slow
def test_one_command_renews_the_report_of_all_tasks(tmp_path):
    for contest in suite.contests("embedded"):
        write(tmp_path, contest, ("grpo", "rloo"), SEEDS[:3])
    done = started(tmp_path, "--suite=embedded", "--methods=grpo, rloo", "--seeds=0,1,2",
                           f"--budget={BUDGET}", "--only_report")
    assert done.returncode == 0, done.stderr[-2000:]
    parts = json.loads((tmp_path / "suite.json").read_text())
    assert [part["contest"]["name"] for part in parts] == [contest.name for contest in suite.contests("embedded")]
    assert parts[1]["methods"]["grpo"]["final"] == pytest.approx(0.41)  # the reward, with its cost
    assert (tmp_path / "README.md").is_file() and (tmp_path / "differences.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("contest", [contest for contests in suite.SUITES.values() for contest in contests],
                         ids=lambda contest: contest.name)
def test_every_task_of_a_suite_takes_every_method_of_the_suite(contest):
    base = suite.config_of(contest)
    for entry in plan.read_entries(suite.METHODS, base):
        plan.check_schedule(entry, plan.read_budget(contest.budget, base))
        method = plan.methods.get(entry.label)
        task, judge = setup.make_judge(entry.config)
        environment = judge.environment if isinstance(judge, Runner) else None
        refusals.check_method(entry.config, method, *parts.make_parts(entry.config, 96), task, environment)


def test_some_tasks_of_a_suite():
    every = suite.contests("embedded")
    assert suite.contests("embedded:tools, mixed") == (every[2], every[0])
    with pytest.raises(ValueError, match="Did you mean 'lengths'"):
        suite.contests("embedded:length")


def test_all_are_those_that_run_by_name():
    result = plan.read_entries("all", suite.config_of(suite.contests("embedded")[0]))
    assert [entry.label for entry in result] == plan.methods.runnable() and len(result) > 80
