"""How well V0 predicts policies and prompts that it was not trained on, beside simpler predictions.

  python experiments/measure_value.py --weights=runs/v0/v0.npz --history=runs/history/policy_history/1.0.0 \\
      --encoder=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out=runs/v0/report

Weights with an adapter read the encoder's tokens; a bare head of --stage=prior reads the leading principal components of
pooled states. Prints a table for unseen prompts and one for seen prompts of unseen policies; writes results.json and a figure.
"""
import json
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_WEIGHTS = flags.DEFINE_string("weights", None, "File of experiments/pretrain_value.py.")
_HISTORY = flags.DEFINE_string("history", None, "Folder that experiments/record_history.py printed.")
_ENCODER = flags.DEFINE_string("encoder", None, "Model directory, .gguf file or run folder.")
_OUT = flags.DEFINE_string("out", None, "Folder for results.json and the figure.")
_SEED = flags.DEFINE_integer("seed", 0, "That of the training: decides what is held out.")
_SIZES = flags.DEFINE_list("sizes", ["32", "64", "128", "256", "512"], "Context sizes.")


def measured(data, unseen, hidden, model, params, features, sizes):
    """Rows of the table: setting, method, context size and scores."""
    import numpy as np

    from jaxrl_llm.experiments.value_parts import measure
    rows, rng = [], np.random.default_rng(_SEED.value)
    half = ~hidden & (rng.random(len(hidden)) < 0.5)
    for setting, askable in (("unseen prompts", hidden), ("seen prompts", half)):
        for size in sizes:
            cases = measure.cases(data, unseen, askable, size, rng)
            def add(name, p):
                return rows.append(
                            {"setting": setting, "method": name, "context": size} | measure.scores(p, cases))
            for name, (x, function) in measure.predictors(model, params, features).items():
                add(name, measure.in_context_predictions(cases, x, function))
            everyone = measure.cases(data, np.ones_like(unseen), askable, size, rng)
            other = measure.strangers(cases, everyone, rng)
            x, function = measure.predictors(model, params, features)["V0"]
            add("V0, context of another policy", measure.in_context_predictions(other, x, function))
            add("earlier visits", measure.earlier_visits(cases))
            if size == sizes[-1]:
                add("conventional value model", measure.conventional(data, ~unseen, ~hidden, features["summary"], cases))
                if setting == "seen prompts":
                    add("mean of other policies", measure.other_policies(data, ~unseen, cases))
    return rows


def draw(rows, path: Path) -> None:
    """Ranking and squared error against the size of the context, for both settings."""
    from jaxrl_llm.tools.figures import COLORS, figure_file
    with figure_file(path, 9, 6.4) as figure:
        panels = [(s, metric) for s in ("unseen prompts", "seen prompts") for metric in ("gAUC", "Brier")]
        for place, (setting, metric) in enumerate(panels, start=1):
            axes = figure.add_subplot(2, 2, place)
            methods = dict.fromkeys(row["method"] for row in rows if row["setting"] == setting)
            for color, method in enumerate(methods):
                points = [(r["context"], r[metric]) for r in rows if r["setting"] == setting and r["method"] == method]
                axes.plot(*zip(*points), marker="os"[color // len(COLORS)], markersize=4, color=COLORS[color % len(COLORS)],
                          label=method, linestyle="--" if "another" in method else "-")
            sizes = sorted({row["context"] for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, map(str, sizes))
            axes.set_title(f"{setting} of unseen policies")
            axes.set_xlabel("context, prompts")
            axes.set_ylabel("AUC within a policy" if metric == "gAUC" else "squared error (Brier)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def main():
    import numpy as np

    from jaxrl_llm.experiments.value_parts import measure
    from jaxrl_llm.values import history, v0
    (model, params), data = v0.load(_WEIGHTS.value), history.load(_HISTORY.value)
    unseen, hidden = history.held_out(data, np.random.default_rng(_SEED.value))
    features = measure.features_of(_ENCODER.value, data, ~hidden, model, params)
    rows = measured(data, unseen, hidden, model, params, features, [int(n) for n in _SIZES.value])
    counts = f"{unseen.sum()} of {len(unseen)} policies and {hidden.sum()} of {len(hidden)} prompts"
    command_line.print_table(rows, f"{counts} unseen")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps({"unseen policies": [n for n, u in zip(data.policies, unseen) if u],
                                                  "rows": rows}, indent=1) + "\n")
    draw(rows, out / "v0.png")
    print(f"wrote {out / 'results.json'} and {out / 'v0.png'}")


if __name__ == "__main__":
    command_line.run(main, "weights", "history", "encoder", "out")
