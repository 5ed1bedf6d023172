"""The report as Markdown: the answer first, then the tables and pictures behind it."""
import functools
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.compare.plan import UNITS
from jaxrl_llm.compare.report import METRIC
from jaxrl_llm.methods.page import table

LEVEL = 0.05  # of all pairs of methods together (Bonferroni): which ones are tested, the data choose


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md` of the numbers that `report.analyse` made, with its figures beside it."""
    sections = [_answer(report), _finals(report), _equal(report), _improvement(report), _efficiency(report), _health(report),
                _pass_at(report), _tuning(report), _how(report)]
    return "\n\n".join(part for part in sections if part) + "\n"


def amount(unit: str, size: float) -> str:
    """A budget in words: "2.0 million generated tokens"."""
    for power, word in ((1e15, " x 10^15"), (1e12, " x 10^12"), (1e9, " x 10^9"), (1e6, " million"), (1e3, " thousand")):
        if size >= power and (unit != "seconds" and unit != "steps" or size >= 1e6):
            return f"{size / power:.3g}{word} {UNITS[unit]}"
    return f"{size:.4g} {UNITS[unit]}"


def counted(number: int, word: str) -> str:
    """"1 seed", "2 seeds"."""
    return f"{number} {word}{'s' * (number != 1)}"


def summary(report: Mapping[str, Any]) -> str:
    """The result as a table for the terminal."""
    rows = [(label, _percent(m["final"], m), f"{_number(m['spent']['tokens'])} tokens", f"{m['spent']['seconds']:.0f} s")
            for label, m in report["methods"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([f"held-out score at {amount(**report['budget'])}, from {report['start']:.1%}:", *lines,
                      *[f"note: {warning}" for warning in report["warnings"]]])


def _level(report) -> float:
    """The p-value that each paired test of the method with the highest mean must reach; any pair could have been shown."""
    return LEVEL / max(math.comb(len(report["order"]), 2), 1)


def _headline(report) -> str:
    """Which method ends highest, if the paired tests can tell and all its parts acted; otherwise why none is named."""
    first, *others = report["order"]
    ended = report["methods"][first]
    score = f"held-out score {_percent(ended['final'], ended)} from {report['start']:.1%} before training"
    if not others:
        return f"{first}: {score}."
    tests = [report["differences"][first][other] for other in others]
    level = _level(report)
    clear = all(test is not None and test["mean"] > 0 and test["p_value"] <= level for test in tests)
    if clear and first not in report["idle"]:
        return f"**{first}** ends highest: {score}."
    least = 2.0 ** (1 - min((test["seeds"] for test in tests if test is not None), default=1))
    reason = (f"; a part of {first} never acted (see the notes)" if clear else
              f"; these seeds cannot give a p-value below {least:.2g}, and {level:.2g} is asked for" if least > level else "")
    return f"No method is shown to be best{reason}. The highest mean is that of {first}: {score}."


def _answer(report) -> str:
    order, level = report["order"], _level(report)
    best = order[0]
    lines = [f"# {len(order)} methods at {amount(**report['budget'])}", "", _headline(report)]
    if len(order) > 1:
        lines += ["", f"Paired tests, each at p <= {level:.2g} ({LEVEL} for all pairs):", ""]
    for other in order[1:]:
        difference = report["differences"][best][other]
        if difference is None:
            continue
        clear = difference["p_value"] <= level
        lines.append(f"- {best} minus {other}: {_points(difference)} points over {counted(difference['seeds'], 'shared seed')} "
                     f"(p = {difference['p_value']:.2g}); {'different' if clear else 'not distinguishable'}.")
    lines += ["", *[f"> {warning}" + "\n>" * (i + 1 < len(report["warnings"])) for i, warning in enumerate(report["warnings"])]]
    if (shown := len(report["shown"])) < len(order):
        lines += ["", f"Curves, and tables with a column for each method, show the {shown} methods with the highest means."]
    lines += ["", "![learning curves](curves.png)"]
    return "\n".join(lines).rstrip()


def _finals(report) -> str:
    rows = [[label, str(len(m["seeds"])), *(_percent(m[name], m) for name in ("final", "final_solved", "best", "mean"))]
            for label, m in report["methods"].items()]
    return ("## Final and best\n\nInterquartile mean over seeds and its 95% bootstrap interval. *Final*: at the budget, linear "
            "between evaluations; *solved*: the share of completions that solve their problem there. *Best*: the highest point "
            "of the curve, which noise pushes up. *Mean*: of the curve.\n\n"
            + table(["method", "seeds", "final", "final, solved", "best", "mean of the curve"], rows)
            + "\n\n![final score](final.png)")


def _equal(report) -> str:
    heads = ["method"] + [amount(unit, report["common"][unit]) for unit in UNITS]
    rows = [[label] + [_percent(m["at_equal"][unit], m) for unit in UNITS] for label, m in report["methods"].items()]
    return ("## At equal budgets of each kind\n\nThe same runs at the largest budget that all of them reached on each axis: "
            "a ranking that holds on one axis only is about that axis.\n\n" + table(heads, rows) + "\n\n![axes](axes.png)")


def _improvement(report) -> str:
    shown = report["shown"]
    if len(shown) < 2:
        return ""
    rows = [[a] + ["" if a == b else _plain(report["improvement"][a][b]) for b in shown] for a in shown]
    return ("## Probability of improvement\n\nChance that a run of the row's method ends above one of the column's "
            "(Mann-Whitney, ties half), with 95% bootstrap interval.\n\n" + table(["", *shown], rows)
            + "\n\n![probability of improvement](improvement.png)")


def _efficiency(report) -> str:
    budget = report["budget"]
    rows = []
    for label, m in report["methods"].items():
        reached, runs = m["to_reach"]["median"], len(m["seeds"])
        reach = "not reached" if isinstance(reached, str) else f"{reached:.3g}"
        rows.append([label, f"{reach} ({m['to_reach']['runs']} of {runs} runs)",
                     _scaled(m["gain_per"]["tokens"], 1e8), _scaled(m["gain_per"]["flops"], 1e14),
                     _scaled(m["gain_per"]["seconds"], 6e3), _number(m["spent"]["tokens"]), _number(m["spent"]["flops"]),
                     _number(m["spent"]["seconds"]), _number(m["spent"]["steps"])])
    heads = ["method", f"{UNITS[budget['unit']]} to reach {report['target']:.1%} (median)", "points per million tokens",
             "points per 10^12 operations", "points per minute", "tokens", "operations", "seconds", "steps"]
    return ("## What it cost\n\nPoints of held-out score gained per unit spent, and what was spent when the budget was used "
            "up. Tokens that a filter threw away are counted; evaluations, warm-up and compilation are not.\n\n"
            + table(heads, rows) + "\n\n![where the time went](time.png)")


def _health(report) -> str:
    names = {"entropy": "entropy, nats", "length": "completion length", "truncated": "cut at the limit",
             "silent_groups": "groups without signal", "gradient_variance": "variance of the gradient",
             "bootstrap": "bootstrap steps"}
    def show(name, x):
        return "" if x is None else f"{x:.1%}" if name in ("truncated", "silent_groups", "bootstrap") else f"{x:.3g}"
    rows = [[label] + [show(name, m[name]) for name in names] for label, m in report["methods"].items()]
    return ("## Health\n\nMeans over the last tenth of the budget; *bootstrap steps*, in which a method is still a simpler "
            "one, are a share of the whole run.\n\n" + table(["method", *names.values()], rows)
            + "\n\n![diagnostics](diagnostics.png)" + _own(report))


def _own(report) -> str:
    rows = {label: ", ".join(f"{name} {x:.3g}" for name, x in m["own"].items()) for label, m in report["methods"].items()}
    lines = [f"- {label}: {text}" for label, text in rows.items() if text]
    return "\n\nMetrics that only some of the methods write:\n\n" + "\n".join(lines) if lines else ""


def _pass_at(report) -> str:
    tables = {label: m["pass_at"] for label, m in report["methods"].items() if m["pass_at"]}
    sizes = sorted({int(k) for table in tables.values() for k in table["after"]})
    if not sizes:
        return ""
    def show(t, k):
        return f"{t['before'][k]:.1%} -> {t['after'][k]:.1%}" if k in t["after"] else ""
    rows = [[label] + [show(table, str(k)) for k in sizes] for label, table in tables.items()]
    return ("## pass@k before and after\n\nUnbiased, mean over seeds, on the held-out problems of each run, at its evaluation "
            "nearest to the budget.\n\n"
            + table(["method"] + [f"pass@{k}" for k in sizes], rows))


def _tuning(report) -> str:
    if not report.get("tuning"):
        return ""
    rows, costs = [], []
    for label, facts in report["tuning"].items():
        show = functools.partial(_of_metric, facts["metric"])
        tests = [", ".join(map(show, scores)) for scores in facts.get("test_scores", [])]
        for choice, scores, mean, test in zip(facts["grid"], facts["scores"], facts["means"],
                                              tests or [""] * len(facts["grid"])):
            kept = "x" if choice == facts["chosen"] else ""
            rows.append([label, choice, ", ".join(map(show, scores)), show(mean), kept, *([test] if tests else [])])
        s = facts["sensitivity"]
        costs.append([label, *(show(s[name], "n/a") for name in ("spread", "seeds", "single_seed_regret")),
                      show(facts.get("gap"), "n/a", "+"),
                      *([show(facts["regret"], "n/a"), ", ".join(show(x, "n/a") for x in facts["single_seed_regret"]),
                         _two(facts["rank_correlation"])] if tests else [])])
    first = next(iter(report["tuning"].values()))
    heads = ["method", "setting", f"`{first['metric']}` per tuning seed", "mean", "kept"]
    measured = ["method", "best mean minus worst", "deviation over seeds", "lost by choosing on one seed",
                "tuning minus testing"]
    if "test_scores" in first:
        heads.append("per testing seed")
        measured += ["lost against the best on testing seeds", "the same, by one tuning seed", "rank correlation"]
    search = "random search, the setting as configured first" if first["drawn"] else "grid"
    return (f"## Tuning\n\nThe same {search} and budget for every method, {len(first['grid'])} settings on seeds "
            f"{', '.join(map(str, first['seeds']))}, which no table above uses; the setting with the highest mean of "
            f"`{first['metric']}` at the budget was kept. The search took {first['runs']} runs of "
            f"{amount(**report['budget'])} for each method.\n\n"
            + table(heads, rows) + f"\n\n### How much the choice matters\n\nIn units of `{first['metric']}`. A difference of "
            "settings no larger than the deviation over seeds is noise; *lost by choosing on one seed* is "
            "measured on the other tuning seeds.\n\n" + table(measured, costs) + _by_value(report["tuning"])
            + "\n\n![tuning](tuning.png)")


def _by_value(tuning) -> str:
    """Mean score of every value of a grid of several keys, over the values of the others."""
    rows = [[label, f"{key}={value}", _of_metric(facts["metric"], mean)] for label, facts in tuning.items()
            if not facts["drawn"] and len(facts["by_value"]) > 1
            for key, means in facts["by_value"].items() for value, mean in means.items()]
    return "\n\n" + table(["method", "value", "mean over the other keys"], rows) if rows else ""


def _of_metric(metric: str, x: Any, absent: str = "failed", sign: str = "") -> str:
    """A number of a held-out metric: scores in percent."""
    return absent if not isinstance(x, float) else f"{x:{sign}.1%}" if metric == METRIC else f"{x:{sign}.3f}"


def _two(x) -> str:
    return f"{x:.2f}" if isinstance(x, float) else "n/a"


def _how(report) -> str:
    lines = ["## How this was made", "", "```bash", report["command"], "```", "", report["facts"]]
    differing = {label: lines for label, lines in report["settings"].items() if lines}
    if differing:
        lines += ["", f"Settings that differ from those of {next(iter(report['settings']))}:", ""]
        lines += [f"- {label}: `{'`, `'.join(changes)}`" for label, changes in differing.items()]
    return "\n".join(lines)


def _percent(interval, method) -> str:
    if any(isinstance(x, str) for x in interval.values()):
        return "n/a"
    return f"{interval['value']:.1%}" + _between(interval, "{:.1%}", len(method["seeds"]))


def _points(difference) -> str:
    return f"{100 * difference['mean']:+.1f}" + _between(
        {side: 100 * difference[side] for side in ("low", "high")}, "{:+.1f}", difference["seeds"])


def _between(interval, form: str, seeds: int) -> str:
    """The interval in brackets; nothing for one seed, which says nothing of others."""
    return f" [{form.format(interval['low'])}, {form.format(interval['high'])}]" if seeds > 1 else ""


def _plain(interval) -> str:
    return f"{interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]"


def _scaled(interval, factor: float) -> str:
    if any(isinstance(x, str) for x in interval.values()):
        return "n/a"
    return f"{interval['value'] * factor:.3g} [{interval['low'] * factor:.3g}, {interval['high'] * factor:.3g}]"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x < 1e9 else f"{x:.3g}"
