"""One self-contained HTML page of run folders: it needs no server, no network and no other file."""
import base64
import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.show import curves, samples
from jaxrl_llm.show.runs import RunFolder, differences, phases
from jaxrl_llm.tools.figures import COLORS
from jaxrl_llm.tools.files import regular
from jaxrl_llm.tools.visible import visible

_PHASES = ("rollout", "reward", "record", "update", "checkpoint", "other")  # these have a colour of their own


def write_page(runs: Sequence[RunFolder], out: Path, completions: int = 1000) -> Path:
    """Writes the page of `runs`, with about `completions` sampled completions of each, to `out`.

    Everything that a policy, a data set or a configuration wrote is data: the template escapes it, the script only sets it as
    text, both spell out invisible characters, and the page forbids itself any request.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
    metrics, marks = [run.metrics for run in runs], curves.marks_of([run.begun for run in runs])
    titled, others = curves.names_of(metrics)
    sampled = [samples.read_groups(run.path, completions) for run in runs]
    columns, rows = differences(runs)
    files = importlib.resources.files("jaxrl_llm.show")
    def seen(value):
        return visible(value) if type(value) is str else value  # (Markup is no mere str)
    template = Environment(autoescape=True, undefined=StrictUndefined, finalize=seen).from_string(
        (files / "page.html").read_text("utf-8"))
    def picture(name):
        picture = curves.svg(name, curves.lines_of(metrics, name), marks)
        return {"title": curves.TITLES.get(name, name), "svg": Markup(picture)}
    text = template.render(
        css=Markup((files / "page.css").read_text("utf-8")), script=Markup((files / "page.js").read_text("utf-8")),
        data=Markup(as_script({
            "runs": [{"name": run.name, "color": curves.color_of(i)} for i, run in enumerate(runs)],
            "curves": {name: curves.data_of(metrics, name) for name in titled + others},
            "groups": [{"run": i, **group} for i, (groups, _) in enumerate(sampled) for group in groups]})),
        runs=[_facts(i, run) for i, run in enumerate(runs)],
        labels=list(dict.fromkeys(label for run in runs for label in run.facts)),
        pictures=[picture(name) for name in titled], others=[picture(name) for name in others],
        columns=columns, differences=rows, shown=[sum(len(g["rows"]) for g in groups) for groups, _ in sampled],
        total=[total for _, total in sampled])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return out


def as_script(content: Any) -> str:
    """JSON in ASCII that cannot end the script element it stands in."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def _facts(number: int, run: RunFolder) -> dict[str, Any]:
    """The facts that the template shows about one run beside its curves."""
    seconds = phases(run.metrics)
    total = sum(seconds.values()) or 1.0
    parts = [{"name": name, "seconds": f"{part:.1f}", "percent": f"{100 * part / total:.2f}",
              "color": COLORS[_PHASES.index(name) if name in _PHASES else -1]} for name, part in seconds.items()]
    figure = regular(run.path, "values.png")
    return {"name": run.name, "path": str(run.path), "color": curves.color_of(number), "facts": run.facts,
            "findings": run.findings, "phases": parts, "config": sorted(run.config.items()),
            "starts": [{"time": start["time"], "host": start["host"], "command": " ".join(start["arguments"]),
                        "packages": ", ".join(f"{k} {v}" for k, v in start["packages"].items())} for start in run.starts],
            "calibration": base64.b64encode(figure.read_bytes()).decode() if figure else None}
