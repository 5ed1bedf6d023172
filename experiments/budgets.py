"""How many groups have both right and wrong answers when a total of rollouts is allocated by predicted success.

  python experiments/budgets.py --weights=runs/v0/v0.npz --history=runs/history/policy_history/1.0.0 \\
      --encoder=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out=runs/budgets [--rollouts=8] [--most=32]

Snapshots of policies that V0 was not trained on answer prompts that it never saw; recorded shares of right answers serve
as the true success. The oracle knows these shares; Reinforce-Ada predicts nothing and draws in rounds. Writes a table,
budgets.json and budgets.png.
"""
import json
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_WEIGHTS = flags.DEFINE_string("weights", None, "File of experiments/pretrain_value.py.")
_HISTORY = flags.DEFINE_string("history", None, "Folder that experiments/record_history.py printed.")
_ENCODER = flags.DEFINE_string("encoder", None, "Model directory, .gguf file or run folder.")
_OUT = flags.DEFINE_string("out", None, "Folder for budgets.json and the figure.")
_ROLLOUTS = flags.DEFINE_integer("rollouts", 8, "Mean rollouts per prompt.", lower_bound=2)
_MOST = flags.DEFINE_integer("most", 32, "Rollouts of one prompt, at most.", lower_bound=2)
_CONTEXT = flags.DEFINE_integer("context", 128, "Prompts in V0's context.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "That of the training: decides what is held out.")


def measured(cases, predictions) -> list[dict]:
    """One row per prediction and utility: means over the snapshots."""
    import numpy as np

    from jaxrl_llm.control.budget import UTILITIES, allocate
    from jaxrl_llm.experiments.value_parts import shares
    rng, rows = np.random.default_rng(_SEED.value), []

    def add(name, utility, per_snapshot):
        mean = {key: float(np.mean([one[key] for one in per_snapshot])) for key in per_snapshot[0]}
        rows.append({"prediction": name, "utility": utility} | mean)

    asked = [(s, np.flatnonzero(real)) for s, real in enumerate(cases.asked) if real.any()]
    truths = [cases.known[s, rows_of] for s, rows_of in asked]
    def total(p):
        return _ROLLOUTS.value * len(p)
    add("none: as many for all", "", [shares.outcome_of(p, np.full(len(p), _ROLLOUTS.value)) for p in truths])
    for name, predicted in predictions.items():
        for utility in UTILITIES:
            counts = [np.asarray(allocate(predicted[s, u], total=total(p), high=_MOST.value, utility=utility))
                      for (s, u), p in zip(asked, truths)]
            add(name, utility, [shares.outcome_of(p, n) for p, n in zip(truths, counts)])
    add("none: Reinforce-Ada, in rounds", "", [shares.outcome_in_rounds(p, total(p), _MOST.value, rng) for p in truths])
    return rows


def draw(rows, path: Path) -> None:
    """Draws the share of mixed groups, a bar for each prediction and utility."""
    from jaxrl_llm.tools.figures import COLORS, figure_file
    utilities = list(dict.fromkeys(row["utility"] for row in rows))
    with figure_file(path, 7.4, 0.9 + 0.24 * len(rows)) as figure:
        axes = figure.add_subplot()
        labels = [f"{row['prediction']}, {row['utility']}" if row["utility"] else row["prediction"] for row in rows]
        axes.barh(labels[::-1], [row["mixed groups"] for row in rows][::-1],
                  color=[COLORS[utilities.index(row["utility"])] for row in rows][::-1])
        axes.set_xlabel("share of groups with right and wrong answers")


def main():
    import numpy as np

    from jaxrl_llm.experiments.value_parts import measure
    from jaxrl_llm.values import history, v0
    (model, params), data = v0.load(_WEIGHTS.value), history.load(_HISTORY.value)
    unseen, hidden = history.held_out(data, np.random.default_rng(_SEED.value))
    features = measure.features_of(_ENCODER.value, data, ~hidden, model, params)
    cases = measure.cases(data, unseen, hidden, _CONTEXT.value, np.random.default_rng(_SEED.value))
    x, function = measure.predictors(model, params, features)["V0"]
    rows = measured(cases, {"V0": measure.in_context_predictions(cases, x, function),
                            "earlier visits": measure.earlier_visits(cases),
                            "oracle": np.where(cases.asked, cases.known, np.nan)})
    title = f"{_ROLLOUTS.value} rollouts per prompt, 2 to {_MOST.value}"
    command_line.print_table(rows, f"{title}; {len(cases.asked)} snapshots of {unseen.sum()} policies, {hidden.sum()} prompts")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / "budgets.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, out / "budgets.png")
    print(f"wrote {out / 'budgets.json'} and {out / 'budgets.png'}")


if __name__ == "__main__":
    command_line.run(main, "weights", "history", "encoder", "out")
