"""A router over a fleet of policies: which one answers which prompt, and success against cost for every trade-off.

  python experiments/route.py --weights=runs/v0/v0.npz --history=runs/history/policy_history/1.0.0 \\
      --encoder=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --costs=runs/a=1,runs/b=4,runs/c=16 --out=runs/route [--beta=0.6]

The last recorded step of each policy in --costs is its context on prompts that V0 was trained on; those that were held out from
its training are routed, and scored with the recorded outcomes. Prints the dispatch of some prompts and writes curve.json and
pareto.png.
"""
import json
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_WEIGHTS = flags.DEFINE_string("weights", None, "File of experiments/pretrain_value.py.")
_HISTORY = flags.DEFINE_string("history", None, "Folder that experiments/record_history.py printed.")
_ENCODER = flags.DEFINE_string("encoder", None, "Model directory, .gguf file or run folder.")
_COSTS = flags.DEFINE_list("costs", None, "policy=cost of one answer, for instance parameters x tokens.")
_OUT = flags.DEFINE_string("out", None, "Folder for curve.json and pareto.png.")
_BETA = flags.DEFINE_float("beta", 0.6, "Trade-off of the printed dispatch: 1 asks for success alone, 0 for the cheapest.",
                           lower_bound=0, upper_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "That of the training: decides what is held out; also of the context prompts.")
_CONTEXT = flags.DEFINE_integer("context", 256, "Context prompts per policy, at most.", lower_bound=2)


def fleet_of(data, texts: list[str]):
    """(names, costs f[M], outcomes f[M, U], NaN where nothing is recorded) of the last step of each policy in `texts`."""
    import numpy as np

    from jaxrl_llm.tools.registry import one_of
    pairs = [text.rpartition("=")[::2] for text in texts]
    names = [one_of("policy of --costs", name, data.policies) for name, _ in pairs]
    if len(names) < 2:
        raise ValueError(f"--costs={','.join(texts)} names {len(names)} policies; a fleet has at least two")
    outcomes = np.full((len(names), len(data.prompts)), np.nan)
    for i, name in enumerate(names):
        rows = data.policy == list(data.policies).index(name)
        rows &= data.step == data.step[rows].max()
        outcomes[i, data.prompt[rows]] = data.outcome[rows]
    return names, np.array([float(cost) for _, cost in pairs]), outcomes


def predictions(model, params, z, summary, outcomes, shown, asked):
    """Name -> predicted success [Q, M] on the asked prompts, from the shown ones."""
    import numpy as np

    from jaxrl_llm.values import in_context, v0
    y = outcomes[:, shown].astype(np.float32)
    real, y = ~np.isnan(y), np.nan_to_num(y)
    def head(*case):
        return v0.success(model.logits(params, *case))
    functions = {"V0": (z, head), "nearest neighbours": (summary, in_context.nearest),
                 "context mean": (summary, in_context.context_mean)}
    return {name: np.stack([np.asarray(f(x[shown], y[m], real[m], x[asked])) for m in range(len(y))], axis=1)
            for name, (x, f) in functions.items()} | {"oracle": outcomes[:, asked].T}


def draw(curves, names, costs, single, path: Path) -> None:
    """Draws score against mean cost: one line per router, one point for each single policy."""
    from jaxrl_llm.tools.figures import COLORS, figure_file
    from jaxrl_llm.values.routing import pareto
    with figure_file(path, 6.4, 4.4) as figure:
        axes = figure.add_subplot()
        for color, (name, curve) in zip(COLORS, curves.items()):
            best = pareto(curve.cost, curve.score)
            points = sorted(set(zip(curve.cost[best], curve.score[best])))
            axes.plot(*zip(*points), marker="o", markersize=3.5, color=color, label=name)
        axes.plot(costs, single, "k*", markersize=9, label="one policy always")
        for name, cost, score in zip(names, costs, single):
            axes.annotate(Path(name).name, (cost, score), textcoords="offset points", xytext=(6, -10), fontsize=8)
        axes.plot(costs.mean(), single.mean(), "x", color="#888888", label="random policy")
        axes.set_xlabel("mean cost of an answer")
        axes.set_ylabel("share of right answers")
        axes.legend()


def main():
    import numpy as np

    from jaxrl_llm.experiments.value_parts import measure
    from jaxrl_llm.values import history, routing, v0
    (model, params), data = v0.load(_WEIGHTS.value), history.load(_HISTORY.value)
    names, costs, outcomes = fleet_of(data, _COSTS.value)
    _, hidden = history.held_out(data, np.random.default_rng(_SEED.value))
    common = np.random.default_rng(_SEED.value).permutation(np.flatnonzero(~np.isnan(outcomes).any(0)))
    shown, asked = common[~hidden[common]][:_CONTEXT.value], common[hidden[common]]
    if len(shown) < 2 or not len(asked):
        raise ValueError(f"only {len(common)} prompts were answered by all of {', '.join(names)}; record more")
    features = measure.features_of(_ENCODER.value, data, shown, model, params)
    predicted = predictions(model, params, features["z"], features["summary"], outcomes, shown, asked)
    betas, actual = np.linspace(0, 1, 41), outcomes[:, asked].T
    curves = {name: routing.curve(p, actual, costs, betas) for name, p in predicted.items()}
    chosen = np.asarray(routing.route(predicted["V0"], costs, beta=_BETA.value))
    for row in range(min(12, len(asked))):
        print(f"{data.prompts[asked[row]][:60]!r:64} -> {names[chosen[row]]}")
    for m, name in enumerate(names):
        print(f"{name:40} gets {np.mean(chosen == m):6.1%} of {len(asked)} prompts; "
              f"alone: {actual[:, m].mean():.3f} at cost {costs[m]:g}")
    rows = np.arange(len(asked))
    print(f"V0 router at beta {_BETA.value:g}: {actual[rows, chosen].mean():.3f} at mean cost {costs[chosen].mean():.3g}")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    facts = {name: {key: value.tolist() for key, value in curve._asdict().items()} for name, curve in curves.items()}
    (out / "curve.json").write_text(json.dumps({"policies": names, "costs": costs.tolist(), "curves": facts}, indent=1) + "\n")
    draw(curves, names, costs, actual.mean(0), out / "pareto.png")
    print(f"wrote {out / 'curve.json'} and {out / 'pareto.png'}")


if __name__ == "__main__":
    command_line.run(main, "weights", "history", "encoder", "costs", "out")
