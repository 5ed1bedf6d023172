"""An evaluation for people: a table for the terminal, a picture of pass@k and maj@k."""
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.compare.figures import save_figure
from jaxrl_llm.tools.figures import COLORS


def rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value with interval) of one measurement."""
    n, length, total = result["samples"], result["length"], result["completions"]
    more = f" or more, {total} together" if total > result["problems"] * n else ""
    shown = [("problems x completions", f"{result['problems']} x {n}{more}"), ("score", _rate(result["score"])),
             ("solved (pass@1)", _rate(result["solved"]))]
    curve = [name for name in result if name.startswith(("pass@", "maj@")) and name not in ("pass@1", "maj@1")]
    shown += [(name, _rate(result[name])) for name in curve]
    shown += [("solved at least once", _rate(result["ever_solved"])), ("cut at the limit", _rate(result["truncated"]))]
    shown += [(f"reward {name}", _rate(values)) for name, values in list(result["components"].items())[1:]]
    shown.append(("completion length, tokens",
                  f"{length['mean']:.1f} (median {length['median']:.0f}, 95% <= {length['p95']:.0f})"))
    if length["right"] is not None and length["wrong"] is not None:
        shown.append(("length where right, wrong", f"{length['right']:.1f}, {length['wrong']:.1f}"))
    return shown


def print_evaluation(title: str, facts: Mapping[str, Any]) -> None:
    """Tables of a measurement, of its levels, and of its comparison with another one."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "value (95% interval)", title=title)
    for label, value in rows(facts["all"]):
        table.add_row(label, value)
    Console().print(table)
    if facts["levels"]:
        table = Table("level", "problems", "score", "solved", "solved at least once", "length")
        for level, result in facts["levels"].items():
            table.add_row(level or "(none)", str(result["problems"]), _rate(result["score"]), _rate(result["solved"]),
                          _rate(result["ever_solved"]), f"{result['length']['mean']:.1f}")
        Console().print(table)
    if facts.get("against"):
        Console().print(comparison_table(facts["against"]))


def print_until(title: str, result: Mapping[str, Any]) -> None:
    """A measurement that sampled until problems were solved, with its hardest ones."""
    from rich.console import Console
    from rich.table import Table

    mean, low, high = result["rate"]
    table = Table("", f"sampled until solved {result['wanted']} times (95% interval)", title=title)
    table.add_row("success rate", f"{mean:.3g} ({low:.3g} to {high:.3g})")
    table.add_row("problems given up", f"{result['given_up']:.1%} of {result['problems']}")
    table.add_row("completions up to the last success", f"{result['tries']:,}")
    for problem, (rate, low, high) in sorted(result["per_problem"].items(), key=lambda item: item[1][2])[:5]:
        table.add_row(f"problem {problem}", f"{rate:.3g} ({low:.3g} to {high:.3g})")
    Console().print(table)


def comparison_table(comparison: Mapping[str, Any]):
    """The paired differences as a table."""
    from rich.table import Table

    title = f"Minus {comparison['file']}, on {comparison['problems']} shared problems x {comparison['samples']}"
    table = Table("", "difference, points (95% interval)", "p", title=title)
    for name, d in comparison.items():
        if isinstance(d, Mapping) and "p_value" in d and name not in ("pass@1", "maj@1"):
            mean, low, high = (100 * d[key] for key in ("mean", "low", "high"))
            table.add_row(name, f"{mean:+.1f} ({low:+.1f} to {high:+.1f})", f"{d['p_value']:.2g}")
    b = comparison["boundary"]
    table.add_row("problems gained, lost, kept", f"{b['expansion']}, {b['shrinkage']}, {b['preserved']}", "")
    for name, (ours, theirs) in comparison.get("differing", {}).items():
        table.add_row(f"not the policies alone: {name}", f"{str(ours)[:60]} here, {str(theirs)[:60]} there", "", style="red")
    return table


def draw(facts: Mapping[str, Any], path: Path) -> Path:
    """pass@k and maj@k with their bands against k, and the share solved by level."""
    levels = facts["levels"]

    def paint(axes):
        _curves(axes[0], facts["all"])
        if levels:
            _levels(axes[1], levels)

    return save_figure(path, (10 if levels else 5.5, 4), 1, 1 + bool(levels), paint)


def _curves(axes, result) -> None:
    from matplotlib.ticker import PercentFormatter, ScalarFormatter
    for color, kind in zip(COLORS, ("pass", "maj")):
        points = sorted((int(name.split("@")[1]), values) for name, values in result.items() if name.startswith(f"{kind}@"))
        if points:
            k = [size for size, _ in points]
            mean, low, high = zip(*[values for _, values in points])
            axes.plot(k, mean, marker="o", markersize=4, color=color, label=f"{kind}@k")
            axes.fill_between(k, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.set_xlabel("k")
    axes.set_title(f"{result['problems']} held-out problems")
    axes.legend()


def _levels(axes, levels) -> None:
    from matplotlib.ticker import PercentFormatter
    for row, (level, result) in enumerate(levels.items()):
        mean, low, high = result["solved"]
        axes.plot([low, high], [row, row], color=COLORS[0], linewidth=5, alpha=0.35, solid_capstyle="butt")
        axes.plot(mean, row, marker="o", color=COLORS[0], markeredgecolor="white", markersize=8)
    axes.set_yticks(range(len(levels)), [level or "(none)" for level in levels])
    axes.set_ylim(-0.6, len(levels) - 0.4)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    axes.set_title("Solved by level")


def _rate(values) -> str:
    mean, low, high = values
    return f"{mean:.1%} ({low:.1%} to {high:.1%})"
