"""Are the values good? Predictions from one rollout of a held-out prompt against the mean reward of its other rollouts."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.experiments.poise_parts import critic as critic_part
from jaxrl_llm.experiments.poise_parts import policy as fixed_policy
from jaxrl_llm.runs.value_plots import draw_reliability
from jaxrl_llm.sampling.fitting import held_out
from jaxrl_llm.setup.probe import capture_of
from jaxrl_llm.tools.figures import COLORS, figure_file
from jaxrl_llm.values import diagnostics, probe

ALPHAS = (0.01, 1.0, 10.0, 100.0, 1000.0)
FOLDS = 5


def measure(config, *, rows: int, prompts: int, samples: int, critic_epochs: int, seed: int) -> dict:
    """Probes fitted to `rows` rollouts (two per training prompt), judged on `prompts` held-out prompts x `samples` rollouts."""
    per_step = max(config.prompts.per_step * config.sampling.group // 2, 1)
    run, params = fixed_policy.fixed(config, per_step, 2)
    layers = range(run.learner.policy.model.config.num_layers)
    keys = (jax.random.fold_in(jax.random.key(seed), i) for i in itertools.count())
    data = fixed_policy.training_problems(run, seed)
    train = [collect(run, params, next(data), next(keys), layers) for _ in range(max(1, rows // (2 * per_step)))]
    problems = held_out(run.source.task.heldout, prompts)
    held = visited(run, params, problems, keys, layers, per_step, samples // 2 + 1)
    earlier = held["rewards"][:, :2].mean(1, keepdims=True)  # of one more visit than the values need
    held = {name: x[:, 2:] for name, x in held.items()}
    rewards = held["rewards"]
    target = (rewards.sum(1, keepdims=True) - rewards) / (rewards.shape[1] - 1)  # of the others: independent of the features
    table = {name: np.concatenate([t[name] for t in train]) for name in train[0] if name != "batch"}
    labels = table["rewards"][:, ::-1].reshape(-1)
    group = np.repeat(np.arange(len(table["rewards"])), 2)
    chosen = capture_of(run.config, run.source.stream.tokenizer, len(layers)).layer

    def fitted(columns, held_columns, alpha=None, name="ridge", components=None):
        """Predictions `[M, samples]` for the held-out rollouts, and the penalty."""
        sizes = (columns.shape[1],) if components is None else ((columns.shape[1] - 3) // 2,) * 2 + (3,)
        options = {"sizes": sizes, "components": components}
        alpha = alpha or by_cross_validation(name, columns, labels, group, options)
        made = probe.make(name, alpha=alpha, **options)
        predicted = fit_predict(made, columns, labels, group, held_columns.reshape(-1, columns.shape[1]))
        return predicted.reshape(target.shape), alpha

    D = (table["features"].shape[-1] - 3) // 2
    def flat(t, layer):
        return t["features"][:, :, layer].reshape(-1, 2 * D + 3)
    x, z = flat(table, chosen), flat(held, chosen)
    order = np.random.default_rng(seed).permutation(len(x))
    def length(t):
        return t["lengths"].reshape(-1, 1).astype(np.float32)
    models = {
        "POISE (all features)": fitted(x, z), "prompt state": fitted(x[:, :D], z[:, :D]),
        "completion state": fitted(x[:, D:2 * D], z[:, D:2 * D]), "entropies": fitted(x[:, 2 * D:], z[:, 2 * D:]),
        "length": fitted(length(table), length(held)), "shuffled features": fitted(x[order], z),
        "constant": (np.full(target.shape, labels.mean()), None),
        "mean of 2 earlier rollouts of the prompt": (np.broadcast_to(earlier, target.shape), None),
    }
    critic_training = {}
    if critic_epochs:
        value, critic_training = critic_part.trained(
            run, params, [t["batch"] for t in train], held_batches(run, params, problems, keys), epochs=critic_epochs)
        models["critic of policy size, at the prompt's end"] = (np.repeat(value[:, None], rewards.shape[1], 1), None)
    tables = {
        "Held-out prompts": [{"model": name, "alpha": alpha or 0.0} | judge(g, target) for name, (g, alpha) in models.items()]
        + [{"model": "noise of the Monte-Carlo values alone", "alpha": 0.0} | judge(noisy(rewards, seed), target)],
        "Layers": [{"layer": i} | judge(fitted(flat(table, i), flat(held, i))[0], target) for i in layers],
        "Penalties and probes": search(fitted, x, z, target, D),
    }
    predictions = {name: g.ravel().tolist() for name, (g, _) in models.items()}
    return {"tables": tables, "predictions": predictions, "target": target.ravel().tolist(), "layer": chosen,
            "critic": critic_training,
            "work": {"rows": len(labels), "prompts": len(rewards), "samples": rewards.shape[1], "seed": seed,
                     "mean_reward": float(rewards.mean()), "sd_of_values": float(rewards.mean(1).std())}}


def visited(run, params, problems, keys, layers, per_step: int, visits: int) -> dict:
    """What `collect` finds in several visits of each problem, `[M, 2 visits, ...]`."""
    held = []
    for start in range(0, len(problems), per_step):
        part = problems[start:start + per_step]
        found = [collect(run, params, part, next(keys), layers) for _ in range(visits)]
        held.append({name: np.concatenate([v[name][:len(part)] for v in found], axis=1) for name in found[0]
                     if name != "batch"})
    return {name: np.concatenate([h[name] for h in held]) for name in held[0]}


def collect(run, params, problems, key, layers) -> dict:
    """Features `[P, G, L, F]`, rewards and lengths `[P, G]` of one batch, and the batch."""
    batch = fixed_policy.sample(run, params, problems, key)
    batch, features = fixed_policy.with_features(run, params, batch, layers)
    return {"features": np.asarray(features), "rewards": np.asarray(batch.rewards, np.float64),
            "lengths": np.asarray(batch.lengths), "batch": batch}


def held_batches(run, params, problems, keys) -> list:
    """One batch of rollouts for every `per_step` held-out prompts: a critic reads their prompts."""
    size = run.config.prompts.per_step
    return [(fixed_policy.sample(run, params, problems[i:i + size], next(keys)), len(problems[i:i + size]))
            for i in range(0, len(problems), size)]


def fit_predict(made, columns, labels, group, new) -> np.ndarray:
    real = np.ones(len(columns), bool)
    params = jax.jit(made.fit)(columns.astype(np.float32), labels.astype(np.float32), real, group)
    return np.asarray(jax.jit(made.predict)(params, new.astype(np.float32)), np.float64)


def by_cross_validation(name, columns, labels, group, options) -> float:
    """The penalty with the least squared error on folds of whole prompts."""
    errors = []
    for alpha in ALPHAS:
        made = probe.make(name, alpha=alpha, **options)
        fit, predict = jax.jit(made.fit), jax.jit(made.predict)
        error = 0.0
        for fold in range(FOLDS):
            out = group % FOLDS == fold
            params = fit(columns.astype(np.float32), labels.astype(np.float32), ~out, group)
            error += float(np.sum((np.asarray(predict(params, columns.astype(np.float32)))[out] - labels[out]) ** 2))
        errors.append(error)
    return ALPHAS[int(np.argmin(errors))]


def noisy(rewards: np.ndarray, seed: int) -> np.ndarray:
    """Numbers as far from the target as true values would be: the target is a mean of a few draws at a prompt's rate."""
    rate, n = rewards.mean(1, keepdims=True), rewards.shape[1] - 1
    target = (rewards.sum(1, keepdims=True) - rewards) / n
    draws = np.random.default_rng(seed).binomial(n, np.clip(rate, 0, 1), rewards.shape) / n
    return target + (draws - rate)


def judge(predicted: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Errors, correlation and calibration of predictions `[M, samples]` against Monte-Carlo values."""
    def single(x):
        return jnp.asarray(x, jnp.float32)
    quality = diagnostics.quality(single(predicted), single(target), jnp.ones(target.shape, bool))
    names = ("mae", "rmse", "bias", "pearson")
    return {name: float(quality[name]) for name in names} | {
        "calibration error": diagnostics.calibration_error(predicted.ravel(), target.ravel())}


def search(fitted, x, z, target, D: int) -> list[dict]:
    """Every penalty, with and without principal components, and the other probes."""
    rows = []
    small = (min(32, D), min(64, D))
    for alpha in ALPHAS:
        rows.append({"probe": "ridge", "alpha": alpha} | judge(fitted(x, z, alpha)[0], target))
    for alpha in ALPHAS[1:]:
        rows.append({"probe": f"ridge, components {small}", "alpha": alpha}
                    | judge(fitted(x, z, alpha, components=small)[0], target))
    for name, alpha in (("sigmoid_bce", 100.0), ("hl_gauss", 100.0), ("mlp", 1.0), (("ridge", "sigmoid_bce"), 100.0)):
        label = name if isinstance(name, str) else "mean of " + ", ".join(name)
        rows.append({"probe": label, "alpha": alpha} | judge(fitted(x, z, alpha, name)[0], target))
    return rows


def draw(results: dict, path) -> None:
    """Reliability of some models, predicted beside Monte-Carlo values, and correlation by layer."""
    target, shape = np.array(results["target"]), (results["work"]["prompts"], -1)
    with figure_file(path, 14, 4.2) as made:
        left, middle, right = made.subplots(1, 3)
        shown = [name for name in results["predictions"]
                 if name in ("POISE (all features)", "entropies", "prompt state") or name.startswith("critic")]
        for name, color in zip(shown, COLORS):
            draw_reliability(left, np.array(results["predictions"][name]), target, color, name)
        left.set_title("Reliability on held-out prompts")
        left.legend(loc="best")
        value = target.reshape(shape).mean(1)
        one = np.array(results["predictions"]["POISE (all features)"]).reshape(shape)[:, 0]
        middle.scatter(one, value, s=10, alpha=0.4, color=COLORS[0], linewidths=0)
        middle.plot([0, 1], [0, 1], color="#8C8C8C", linestyle="--", linewidth=1)
        middle.set_xlabel("value predicted from one rollout")
        middle.set_ylabel("Monte-Carlo value")
        middle.set_title("POISE, one dot per prompt")
        rows = results["tables"]["Layers"]
        right.plot([row["layer"] for row in rows], [row["pearson"] for row in rows], marker="o", color=COLORS[2])
        right.axvline(results["layer"], color="#8C8C8C", linestyle="--", linewidth=1)
        right.set_xlabel("pooled block (dashed: the configured one)")
        right.xaxis.get_major_locator().set_params(integer=True)
        right.set_ylabel("Pearson with Monte-Carlo values")
        right.set_title("Layers")
