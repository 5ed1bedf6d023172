"""The report of made-up runs with known numbers, its warnings, and all its pictures."""
import dataclasses
import json
import re

import numpy as np
import pytest
from run_folders import base, write_run

from jaxrl_llm.compare import figures, page, plan, report

BUDGET = plan.Budget("tokens", 100.0)  # half way between the evaluations at 80 and 160


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """grpo is better on every seed and slower; the last seed of rloo stops after its first evaluation."""
    root = tmp_path_factory.mktemp("compared")
    jobs = plan.jobs_of(plan.read_entries("grpo(sampling.group=4), rloo", base()), [0, 1, 2, 3], BUDGET, root / "runs")
    for job in jobs:
        if job.entry.config.method == "grpo":
            write_run(job, BUDGET, [0.1, 0.3 + 0.01 * job.seed, 0.5 + 0.01 * job.seed], length=2.5, seconds=4.0,
                      more={"grpo/kept": 0.25})
        elif job.seed < 3:
            write_run(job, BUDGET, [0.1, 0.2, 0.2 + 0.04 * job.seed])
        else:
            write_run(job, BUDGET, [0.1])
            (job.folder / "log.txt").write_text("step 1/9\nRuntimeError: no more memory\n")
    results, warnings = report.finished_runs(jobs, BUDGET)
    result = report.analyse(results, BUDGET, warnings)
    result |= {"settings": report.settings(results), "facts": report.facts(results), "command": "python experiments/compare.py"}
    return root, results, json.loads(json.dumps(result, allow_nan=False))


def test_final_best_and_mean_at_the_budget(compared):
    result = compared[2]
    assert result["order"] == ["grpo", "rloo"]
    grpo, rloo = result["methods"].values()
    # A quarter of the way from 0.3 to 0.5 (budget 100 between 80 and 160); four seeds lose one at each end.
    assert [run["final"] for run in grpo["runs"]] == pytest.approx([0.35, 0.36, 0.37, 0.38])
    assert grpo["final"]["value"] == pytest.approx(0.365) and 0.35 <= grpo["final"]["low"] < 0.365 < grpo["final"]["high"]
    assert [run["final"] for run in rloo["runs"]] == pytest.approx([0.2, 0.21, 0.22])
    assert rloo["best"]["value"] == pytest.approx(0.21)
    assert rloo["runs"][0]["mean"] == pytest.approx((80 * 0.15 + 20 * 0.2) / 100)
    assert rloo["seeds"] == [0, 1, 2]


def test_who_is_better_and_by_how_much(compared):
    result = compared[2]
    grpo, rloo = result["order"]
    assert result["improvement"][grpo][rloo] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert result["improvement"][rloo][grpo]["value"] == 0.0
    paired = result["differences"][grpo][rloo]
    assert paired["mean"] == pytest.approx(0.15) and paired["seeds"] == 3 and paired["p_value"] == 0.25


def test_what_was_spent(compared):
    grpo, rloo = compared[2]["methods"].values()
    assert grpo["spent"]["tokens"] == rloo["spent"]["tokens"] == 100
    assert grpo["spent"]["steps"] == rloo["spent"]["steps"] == 2.5
    assert grpo["spent"]["seconds"] == 2 * rloo["spent"]["seconds"] == 10
    assert rloo["gain_per"]["seconds"]["value"] == pytest.approx(0.11 / 5)
    # 80% of the best gain: 0.1 + 0.8 * 0.265 = 0.312, which rloo never reaches; grpo's middle seeds do after 80 * 212 / 220
    # (from 0.1 to 0.32) and 80 + 80 * 2 / 200 (from 0.31 to 0.51).
    assert compared[2]["target"] == pytest.approx(0.312)
    assert rloo["to_reach"] == {"median": "inf", "runs": 0}
    assert grpo["to_reach"] == {"median": pytest.approx((80 * 212 / 220 + 80.8) / 2), "runs": 4}
    common = compared[2]["common"]
    assert (common["tokens"], common["steps"], common["seconds"]) == (100, 4, 8)
    assert rloo["at_equal"]["seconds"]["value"] == pytest.approx(0.24)  # the end of its curve
    assert grpo["at_equal"]["seconds"]["value"] == pytest.approx(0.315)  # half of its steps


def test_health_phases_and_pass_at_k(compared):
    grpo, rloo = compared[2]["methods"].values()
    assert (rloo["entropy"], rloo["length"], grpo["length"]) == (None, None, None)  # no step ends within the last tenth
    assert rloo["phases"] == {"rollout": 0.5, "update": 1.0}
    # Pages of three prompts x G: at step 0 the groups of two have one right for prompts 0 and 2.
    assert rloo["pass_at"]["before"] == {"1": pytest.approx(1 / 3), "2": pytest.approx(2 / 3)}
    assert grpo["pass_at"]["before"]["4"] == 1.0 and set(grpo["pass_at"]["after"]) == {"1", "2", "4"}


def test_groups_of_unequal_size_have_no_pass_at_k(tmp_path):
    """An environment may lose trajectories of a held-out evaluation."""
    page = tmp_path / "step_000000.jsonl"
    rows = [{"prompt_index": p, "solved": p == g} for p in range(3) for g in range(4)]
    page.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report.held_out_correct(page).shape == (3, 4)
    page.write_text("".join(json.dumps({**row, "completion": "\u2028"}, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    assert report.held_out_correct(page).shape == (3, 4), "a separator of lines in a text is none of the file"
    page.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert report.held_out_correct(page) is None


def test_means_of_the_last_tenth(compared):
    _, results, _ = compared
    assert report.late_mean(results["rloo"], plan.Budget("tokens", 80.0), "entropy") == 0.5
    assert report.late_mean(results["rloo"], BUDGET, "no such metric") is None


def test_metrics_of_a_method(compared):
    _, results, result = compared
    assert report.own_metrics(results["grpo"], plan.Budget("tokens", 80.0), {"reward/mean"}) == {
        "completion/length": 2.5, "grpo/kept": 0.25, "trained/rollouts": 16.0}
    assert result["methods"]["grpo"]["own"] == {}  # no step ends within the last tenth of this budget
    own = {label: m | {"own": {"grpo/kept": 0.25} if label == "grpo" else {}} for label, m in result["methods"].items()}
    assert "Metrics that only some of the methods write:\n\n- grpo: grpo/kept 0.25" in page.markdown(result | {"methods": own})
    assert "only some of the methods" not in page.markdown(result)


def test_missing_data_are_named(compared):
    root, results, result = compared
    warnings = " ".join(result["warnings"])
    assert "rloo seed 3 is not finished (0% of the budget)" in warnings and "RuntimeError: no more memory" in warnings
    assert "different numbers of finished seeds: grpo: 4, rloo: 3" in warnings
    assert result["settings"]["rloo"] == ["sampling.group: 4 -> 2", "sampling.max_group: 16 -> 8"]
    one = {"grpo": results["rloo"][:1]}
    assert "are unreliable" in report.cautions(one)[0]


def with_metric(runs, name, *values):
    """The same runs of four steps with one more metric, absent at step 0; two values come twice."""
    return [r._replace(run=dataclasses.replace(r.run, metrics=r.run.metrics | {name: np.array([np.nan, *values * 2])}))
            for r in runs]


def test_runs_that_never_left_their_bootstrap_are_left_out(compared):
    results = compared[1]
    mixed = results | {"rloo": with_metric(results["rloo"], "bootstrap", 1.0, 0.0)}
    left, notes = report.without_idle(mixed)
    assert notes == [] and len(left["rloo"]) == 3 and report.bootstrap_share(mixed["rloo"]) == 0.5
    assert report.bootstrap_share(results["grpo"]) is None
    idle = with_metric(results["rloo"], "bootstrap", 1.0, 1.0)
    left, notes = report.without_idle(results | {"rloo": [idle[0], mixed["rloo"][1], idle[2]]})  # one that left saves no other
    assert [r.job.seed for r in left["rloo"]] == [1] and len(left["grpo"]) == 4
    assert [note.partition(":")[0] for note in notes] == ["rloo seed 0 is left out", "rloo seed 2 is left out"]
    assert list(report.without_idle(results | {"rloo": idle})[0]) == ["grpo"]


def test_runs_whose_parts_never_acted_are_named_by_seed(compared):
    _, results, result = compared
    assert result["idle"] == [] and report.doubts(results, BUDGET) == []
    rloo = results["rloo"]
    idle, active = with_metric(rloo[:2], "filter/kept", 1.0, 1.0), with_metric(rloo[2:], "filter/kept", 1.0, 0.5)
    some = results | {"rloo": idle + active}
    assert report.doubts(some, BUDGET) == ["rloo, seeds 0, 1: its filter dropped no prompt"]
    for name, value, text in (("replay/share", 0.0, "nothing was replayed"),
                              ("filter/void_turns/dropped", 0.0, "filter void_turns dropped no completion")):
        assert report.idle_parts(with_metric(rloo, name, value, value)[0].run) == [text]
        assert report.idle_parts(with_metric(rloo, name, value, 0.5)[0].run) == []
    analysis = report.analyse(some, BUDGET)
    assert analysis["idle"] == ["rloo"] and "rloo, seeds 0, 1: its filter dropped no prompt" in analysis["warnings"]


def test_runs_without_signal_and_scores_that_did_not_move_are_named(compared):
    _, results, _ = compared
    silent = with_metric(results["rloo"][:1], "groups/all_equal", 1.0, 1.0)
    there_and_back = {"eval/score": np.array([.1, np.nan, .3, np.nan, .1])}
    flat = [r._replace(run=dataclasses.replace(r.run, metrics=r.run.metrics | there_and_back)) for r in results["rloo"][1:2]]
    assert report.doubts({"rloo": silent}, BUDGET) == ["rloo, seed 0: all groups had equal rewards"]
    assert report.doubts({"rloo": with_metric(results["rloo"], "groups/all_equal", 1.0, 0.9)}, BUDGET) == []
    assert report.doubts({"rloo": flat}, plan.Budget("tokens", 160.0)) == [
        "rloo, seed 1: it ends at the score that it started from"]
    assert report.doubts({"rloo": flat}, BUDGET) == []  # half way back


def test_the_headline_names_a_winner_only_where_all_paired_tests_do(compared):
    _, _, result = compared
    def headline(*p_values, seeds=8, mean=0.1, idle=()):
        others = [f"other{i}" for i in range(len(p_values))]
        test, order = {"mean": mean, "low": 0.01, "high": 0.2, "seeds": seeds}, ["grpo", *others]
        differences = {"grpo": {name: test | {"p_value": p} for name, p in zip(others, p_values)}}
        even = {a: {b: {"value": 0.5, "low": 0.0, "high": 1.0} for b in order} for a in order}
        rows = result["methods"] | dict.fromkeys(others, result["methods"]["rloo"])
        return page.markdown(result | {"order": order, "shown": order, "differences": differences, "methods": rows,
                                       "improvement": even, "idle": idle})
    assert "**grpo** ends highest" in headline(0.008) and "**grpo** ends highest" in headline(0.008, 0.016)
    assert "**" not in headline(0.008, 0.02).partition("##")[0]  # 0.05 is shared by three pairs
    lines = [line for line in headline(0.008, 0.04).splitlines() if line.startswith("- grpo minus")]
    assert "each at p <= 0.017 (0.05 for all pairs)" in headline(0.008, 0.04)
    assert [line.rpartition("; ")[2] for line in lines] == ["different.", "not distinguishable."]
    assert "**grpo**" in headline(0.008, idle=["other0"])
    assert "best; a part of grpo never acted (see the notes). The highest mean" in headline(0.008, idle=["grpo"])
    assert "No method is shown to be best. The highest mean is that of grpo" in headline(0.2)
    assert "cannot give a p-value below 0.12, and 0.05 is asked for" in headline(0.125, seeds=4)


@pytest.mark.slow
def test_of_many_methods_only_the_best_are_drawn_and_compared_in_pairs(compared):
    """A column or a curve for each of 120 methods cannot be read, and a bootstrap for each pair takes minutes."""
    root, results, result = compared
    many = {f"method{i:02d}": results["rloo"] for i in range(13)} | {"grpo": results["grpo"]}
    many = report.analyse(many, BUDGET, [])
    shown = many["shown"]
    assert len(many["order"]) == len(many["methods"]) == 14 and shown == many["order"][:12] and shown[0] == "grpo"
    assert list(many["improvement"]) == shown and len(many["improvement"]["grpo"]) == 11
    assert list(many["differences"]) == shown and len(many["differences"]["grpo"]) == 13  # the headline needs all of the best's
    text = page.markdown(result | many | {"settings": {}})
    assert "show the 12 methods with the highest means" in text and "show the" not in page.markdown(result)
    assert text.count("| method12 |") == text.count("| method00 |") - 2  # the head and the row of the table of pairs
    everyone = {label: results["grpo" if label == "grpo" else "rloo"] for label in many["order"]}
    assert len(figures.draw_all(everyone, result | many, root / "many")) == 6


def test_one_seed_has_no_interval(compared):
    result = compared[2]
    grpo, rloo = result["order"]
    alone = {"value": 0.413, "low": 0.413, "high": 0.413}
    difference = result["differences"][grpo][rloo] | {"mean": 0.2, "low": 0.2, "high": 0.2, "seeds": 1, "p_value": 1.0}
    methods = {label: m | {"final": alone, "seeds": [0]} for label, m in result["methods"].items()}
    text = page.markdown(result | {"methods": methods, "differences": {grpo: {rloo: difference}}})
    assert "held-out score 41.3% from" in text and "| 41.3% |" in text and "[41.3%, 41.3%]" not in text
    assert "+20.0 points over 1 shared seed (p = 1); not distinguishable." in text


@pytest.mark.slow
def test_the_page_and_its_pictures(compared):
    root, results, result = compared
    text = page.markdown(result)
    drawn = {path.name for path in figures.draw_all(results, result, root)}
    assert drawn == set(re.findall(r"\]\((\w+\.png)\)", text))
    assert all((root / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in drawn)
    assert "# 2 methods at 100 generated tokens" in text and "ends highest" not in text
    assert "No method is shown to be best; these seeds cannot give a p-value below 0.25, and 0.05 is asked for" in text
    assert "+15.0 [" in text and "not distinguishable" in text and "not reached (0 of 3 runs)" in text
    assert "| rloo | 3 | 21.0% [" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.count("|") >= 3
    assert "21.0%" in page.summary(result) and "note: rloo seed 3" in page.summary(result)


def test_curves_are_read_on_a_common_grid(compared):
    x, y = report.curves(compared[1]["rloo"], "tokens", 80.0)
    assert x[0] == 0 and x[-1] == 80 and y.shape == (3, 101)
    np.testing.assert_allclose(y[0], 0.1 + 0.1 * x / 80, atol=1e-12)
    assert np.isnan(report.curves(compared[1]["rloo"], "tokens", 80.0, "absent")[1]).all()


def test_amounts_for_people():
    assert page.amount("tokens", 2.5e6) == "2.5 million generated tokens"
    assert page.amount("flops", 3e13) == "30 x 10^12 floating-point operations"
    assert page.amount("seconds", 1200) == "1200 training seconds"


def test_the_text_of_a_search(compared):
    """A search over two keys: it keeps the worked example's setting, names a failed run, and shows the cost of testing all."""
    grid = [{"a": 1, "b": 4}, {"a": 1, "b": 8}, {"a": 2, "b": 4}]
    tune = [[.5, .7], [.9, .2], [.6, .65]]
    result = report.tuning(grid, 2, [7, 8], tune, drawn=False)
    result |= report.protocol(result, [[.55, .6], [.4, .5], [.62, .6]])
    assert result["chosen"] == "a=2, b=4" and result["runs"] == 6 and result["by_value"]["a"]["2"] == pytest.approx(.625)
    assert result["regret"] == 0 and result["single_seed_regret"] == pytest.approx([.16, .035])
    text = page.markdown(compared[2] | {"tuning": {"grpo": result | {"gap": .015}}})
    for words in ("grid and budget", "took 6 runs of 100 generated tokens",
                  "| grpo | a=2, b=4 | 60.0%, 65.0% | 62.5% | x | 62.0%, 60.0% |",
                  "| grpo | 7.5% |", "| +1.5% | 0.0% | 16.0%, 3.5% | 1.00 |", "| grpo | b=8 | 55.0% |"):
        assert words in text, words
    broken = report.tuning([{}, {"a": 3}], 0, [7, 8], [[.5, .6], [.7, float("nan")]], drawn=True)
    assert broken["grid"] == ["as configured", "a=3"] and broken["means"][1] == "nan" and broken["by_value"]["a"]["3"] == .7
    text = page.markdown(json.loads(json.dumps(compared[2] | {"tuning": {"grpo": broken}}, allow_nan=False)))
    assert "random search" in text and "| grpo | a=3 | 70.0%, failed | failed |  |" in text


@pytest.mark.slow
def test_a_search_is_drawn(compared, tmp_path):
    result = report.tuning([{}, {"a": 3}], 0, [7, 8], [[.5, .6], [.7, float("nan")]], drawn=True)
    figures.draw_all(compared[1], compared[2] | {"tuning": {"grpo": result, "rloo": result}}, tmp_path)
    assert (tmp_path / "tuning.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
