"""Is the gradient unbiased? One token by enumeration, then a small model against a reference gradient."""
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.experiments.poise_parts import policy as fixed_policy
from jaxrl_llm.tools.figures import COLORS, figure_file
from jaxrl_llm.values.poise import cross_rollout


def enumeration(p: float = 0.3) -> list[dict]:
    """One Bernoulli token with P(a = 1) = p, r = a, g = .2 + .5 a, two rollouts: expected gradient for the logit."""
    rows = {"true gradient p (1 - p)": p * (1 - p), "cross-rollout baseline": 0.0, "own-feature baseline": 0.0}
    for a in itertools.product((0, 1), repeat=2):
        chance = float(np.prod([p if x else 1 - p for x in a]))
        for i in (0, 1):
            grad_log_p = a[i] - p
            rows["cross-rollout baseline"] += chance * (a[i] - (0.2 + 0.5 * a[1 - i])) * grad_log_p / 2
            rows["own-feature baseline"] += chance * (a[i] - (0.2 + 0.5 * a[i])) * grad_log_p / 2
    return [{"estimate": name, "expected gradient": float(x)} for name, x in rows.items()]


def measure(config, *, batches: int, completions: int, reference: int, rows: int, seed: int) -> dict:
    """Gradient estimates of every method from `batches` batches, against the mean of `reference` other completions."""
    pairs, params = fixed_policy.fixed(config, completions // 2, 2)
    eights = fixed_policy.resized(pairs, completions // 8, 8)
    keys = (jax.random.fold_in(jax.random.key(seed), i) for i in itertools.count())
    problems = {run.config.sampling.group: fixed_policy.training_problems(run, seed) for run in (pairs, eights)}

    def batch(run):
        rollouts = fixed_policy.sample(run, params, next(problems[run.config.sampling.group]), next(keys))
        rollouts, features = fixed_policy.with_features(run, params, rollouts)
        return rollouts.replace(features=features)

    estimator = advantages.make("poise", feature_size=pairs.feature_size, capacity=rows, bootstrap=0, first_fit=1)
    state, observe = estimator.init(), jax.jit(estimator.update)
    while int(state[0].buffer.real.sum()) < rows // completions * completions:
        state = observe(batch(pairs), state)[1]

    @jax.jit
    def gradient(params, rollouts, weights):
        def loss(params):
            logprobs, _ = pairs.policy.logprobs(params, None, rollouts)
            return -jnp.sum(jnp.where(rollouts.token_mask, logprobs * weights, 0.0)) / rollouts.valid.size
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(jax.grad(loss)(params))])

    rloo, grpo, quality = advantages.make("rloo"), advantages.make("grpo"), []
    vectors: dict[str, list] = {name: [] for name in ("POISE", "own features", "RLOO", "GRPO", "RLOO of 8", "reference")}
    for _ in range(max(2, reference // completions)):
        pair = batch(pairs)
        vectors["reference"].append(np.asarray(gradient(params, pair, rloo.update(pair, ())[0])))
    for _ in range(batches):
        pair, eight = batch(pairs), batch(eights)
        ours = observe(pair, state)[0]
        quality.append(jax.device_get(estimator.metrics(pair, ours, state)))
        # r - g(phi_i) from r - g(phi_j): with two rollouts the other's baseline is one's own prediction.
        own = (pair.rewards - cross_rollout(pair.rewards - ours[..., 0], pair.valid))[..., None] * pair.token_mask
        for name, source, weights in (("POISE", pair, ours), ("own features", pair, own),
                                      ("RLOO", pair, rloo.update(pair, ())[0]), ("GRPO", eight, grpo.update(eight, ())[0]),
                                      ("RLOO of 8", eight, rloo.update(eight, ())[0])):
            vectors[name].append(np.asarray(gradient(params, source, weights)))
    stacked = {name: np.stack(x) for name, x in vectors.items()}
    names = ("POISE", "own features", "RLOO", "GRPO")
    table = [{"method": name} | compare(stacked[name], stacked["RLOO of 8" if name == "GRPO" else "RLOO"],
                                        stacked["reference"], rescale=name == "GRPO") for name in names]
    of_probe = {name.removeprefix("value/"): float(np.mean([q[name] for q in quality])) for name in quality[0]}
    return {"tables": {"One token, by enumeration": enumeration(), "Gradients of the small model": table,
                       "The probe": [of_probe]},
            "work": {"batches": batches, "completions": completions, "reference": reference, "rows": rows, "seed": seed}}


def compare(x: np.ndarray, rloo: np.ndarray, reference: np.ndarray, rescale: bool) -> dict[str, float]:
    """The quality of the estimates `x [K, n]`, with jackknife standard errors over the K batches.

    `scale`: projection of their mean on the reference, in units of it; 1 for an unbiased estimate. `cosine`: with the
    reference, as it comes; `cosine without noise`: squared lengths from products of different batches, in which
    independent noise cancels. `bias`: length of the mean difference to RLOO on the same completions, without noise, over
    the gradient's length (`rescale`: after bringing x to the scale of the reference; negative where noise outweighs it).
    `noise`: total variance of one estimate over RLOO's, both at their scale.
    """
    R = reference.mean(0)
    length2 = cross(reference @ reference.T)
    if length2 <= 0:
        print("warning: the reference gradient is lost in noise; raise --reference, or take a policy that succeeds more often")
        length2 = float(R @ R)
    along = x @ R / length2
    factor = along.mean() if rescale else 1.0
    d = x / factor - rloo
    grams = {"x": x @ x.T, "d": d @ d.T, "rloo": rloo @ rloo.T}

    def numbers(keep):
        g = {name: gram[np.ix_(keep, keep)] for name, gram in grams.items()}
        scale, own2, diff2 = along[keep].mean(), cross(g["x"]), cross(g["d"])
        def noise(gram):
            return np.trace(gram) / len(keep) - cross(gram)
        raw = scale * length2 / np.sqrt(g["x"].mean() * (R @ R))
        return np.array([scale, raw, scale * length2 / np.sqrt(own2 * length2) if own2 > 0 else np.nan,
                         np.sign(diff2) * np.sqrt(abs(diff2) / length2), noise(g["x"]) / factor**2 / noise(g["rloo"])])

    K = len(x)
    whole = numbers(np.arange(K))
    parts = np.stack([numbers(np.delete(np.arange(K), i)) for i in range(K)])
    error = np.sqrt((K - 1) / K * ((parts - parts.mean(0)) ** 2).sum(0))
    names = ("scale", "cosine", "cosine without noise", "bias", "noise")
    return {k: float(v) for i, name in enumerate(names) for k, v in ((name, whole[i]), (f"{name} +-", error[i]))}


def cross(gram: np.ndarray) -> float:
    """Mean product of different rows: the squared length of their mean without the share of independent noise."""
    K = len(gram)
    return float((gram.sum() - np.trace(gram)) / (K * (K - 1)))


def draw(results: dict, path) -> None:
    """Bars with standard errors, one panel per number."""
    rows = results["tables"]["Gradients of the small model"]
    with figure_file(path, 12, 3.6) as made:
        panels = (("scale", "gradient in units of the true one", 1.0),
                  ("cosine without noise", "cosine with the reference", 1.0),
                  ("bias", "bias / gradient length", 0.0), ("noise", "variance of an estimate / RLOO's", 1.0))
        for axes, (name, title, truth) in zip(made.subplots(1, 4), panels):
            labels = [row["method"].replace(" ", "\n") for row in rows]
            axes.bar(labels, [row[name] for row in rows], yerr=[row[f"{name} +-"] for row in rows],
                     color=COLORS[:len(rows)], capsize=4)
            axes.axhline(truth, color="#666666", linestyle="--", linewidth=1)
            axes.set_title(title, fontsize=10)
