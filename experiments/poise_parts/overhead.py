"""The cost of the probe: capture in the pass for log-probs, prediction, buffer and refit, as shares of a training step."""
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.evaluation import flops
from jaxrl_llm.experiments.poise_parts import policy as fixed_policy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.probe import capture_of
from jaxrl_llm.tools.figures import COLORS, figure_file
from jaxrl_llm.tools.timer import PhaseTimer

# The paper's larger policy and its step, counted but not run: 1024 prompts x 2, here with 512 + 2048 tokens.
LARGE = ModelConfig(vocab_size=151_936, hidden_size=2560, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128,
                    mlp_size=9728)
PROMPTS, PROMPT, COMPLETION = 1024, 512, 2048


def seconds(function, *arguments, repeats: int) -> float:
    """Median seconds of a compiled call."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def side_by_side(functions: dict, *arguments, repeats: int) -> dict[str, float]:
    """Median seconds of two compiled calls that take turns, and of their difference."""
    times = {name: [] for name in functions}
    for number in range(repeats + 1):  # the first compiles
        for name, function in functions.items():
            began = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if number:
                times[name].append(time.perf_counter() - began)
    first, second = map(np.array, times.values())
    return {name: float(np.median(x)) for name, x in times.items()} | {"difference": float(np.median(second - first))}


def measure(config, *, rows: int, repeats: int) -> dict:
    """Seconds of every part at the width of the configured policy and at 2560, both with `rows` rows."""
    own, passes = steps(config, repeats)
    gemm = matrix_rate()
    large = large_step_flops() / gemm
    table = []
    for width, prompts, step, captured, how in (
            (own["width"], own["prompts"], own["step"], passes["difference"], "measured"),
            (LARGE.hidden_size, PROMPTS, large, pooling_flops() / gemm, "counted operations / matrix product rate")):
        costs = probe_seconds(width, prompts, rows, repeats)
        total = max(captured, 0.0) + costs["all"]
        table.append({"width": width, "rows": rows, "prompts": prompts, "capture s": max(captured, 0.0),
                      "predict s": costs["predict"], "predict, append and refit s": costs["all"], "step s": step,
                      "share of step": total / step, "step is": how})
    return {"tables": {"Probe": table, "Pass for log-probs of one batch": [passes | {"phases s": str(own["phases"])}]},
            "work": {"repeats": repeats, "gemm_flops_per_s": gemm, "device": jax.devices()[0].device_kind,
                     "large": f"{PROMPTS} x 2, {PROMPT} + {COMPLETION} tokens, {dataclasses.asdict(LARGE)}"}}


def probe_seconds(width: int, prompts: int, rows: int, repeats: int) -> dict[str, float]:
    """The estimator at its defaults with a full window of `rows`: one whole update, and prediction alone."""
    size, rng = 2 * width + 3, np.random.default_rng(0)
    estimator = advantages.make("poise", feature_size=size, capacity=rows, bootstrap=0, first_fit=1)
    update = jax.jit(estimator.update)

    def batch(count):
        features = jnp.asarray(rng.normal(size=(count, 2, size)), jnp.float32)
        real = jnp.ones((count, 2, 1), bool)
        return Rollouts(mask=real, valid=real[..., 0], rewards=jnp.asarray(rng.integers(0, 2, (count, 2)), jnp.float32),
                        features=features)

    _, state = update(batch(rows // 2), estimator.init())
    new = batch(prompts)
    predict = jax.jit(lambda new, state: estimator.update(new, state)[0])  # the compiler drops what only the state needs
    return {"all": seconds(update, new, state, repeats=repeats), "predict": seconds(predict, new, state, repeats=repeats)}


def steps(config, repeats: int) -> tuple[dict, dict]:
    """Seconds of a POISE step of the configured policy with its number of completions in pairs, and of its log-probs."""
    prompts = max(config.prompts.per_step * config.sampling.group // 2, 1)
    run, params = fixed_policy.fixed(config, prompts, 2)
    state = setup.initial_state(run, params)
    times = []
    for number in range(repeats + 2):  # the first compiles; a later batch may still have a new length
        timer, began = PhaseTimer(), time.perf_counter()
        finished = run.source.next(run.learner.publish(state), timer)
        state = run.learner.learn(state, finished.rollouts, timer=timer).state
        times.append(timer.collect() | {"time/step": time.perf_counter() - began})
    median = {name.removeprefix("time/"): float(np.median([f[name] for f in times[2:]])) for name in times[-1]}
    batch = fixed_policy.sample(run, state.params, next(fixed_policy.training_problems(run, 0)), jax.random.key(1))
    policy = run.learner.policy
    capture = capture_of(run.config, run.source.stream.tokenizer, policy.model.config.num_layers)
    captured = functools.partial(policy.logprobs_and_features, capture=capture)
    passes = side_by_side({"plain": jax.jit(policy.logprobs), "captured": jax.jit(captured)}, state.params, None, batch,
                          repeats=2 * repeats)
    phases = {name: round(x, 4) for name, x in median.items() if name != "step"}
    return {"width": policy.model.config.hidden_size, "prompts": prompts, "step": median["step"], "phases": phases}, passes


def matrix_rate() -> float:
    """Operations per second of a large float32 matrix product."""
    n = 2048 if jax.default_backend() == "cpu" else 8192
    square = jnp.ones((n, n))
    return 2 * n**3 / seconds(jax.jit(lambda a: a @ a), square, repeats=7)


def large_step_flops() -> float:
    """Useful operations of a step of the large policy: sampling and one update, which also captures features."""
    decode = 2 * flops.decode_flops(LARGE, PROMPT, COMPLETION)
    packed = flops.packed_flops(LARGE, PROMPT, [COMPLETION] * 2)
    return PROMPTS * (flops.prefill_flops(LARGE, [PROMPT]) + decode + 3 * packed)


def pooling_flops() -> float:
    """A masked sum of every layer's states: two operations per number."""
    return 2.0 * LARGE.num_layers * LARGE.hidden_size * PROMPTS * (PROMPT + 2 * COMPLETION)


def draw(results: dict, path) -> None:
    """The parts of the probe's share of a step at each width, beside the 3% it may cost."""
    rows = results["tables"]["Probe"]
    with figure_file(path, 6.4, 3.6) as made:
        axes, left = made.subplots(), np.zeros(len(rows))
        labels = [f"width {row['width']}\n(step {row['step is'].split()[0]})" for row in rows]
        refit = [row["predict, append and refit s"] - row["predict s"] for row in rows]
        for i, (name, values) in enumerate((("capture", [row["capture s"] for row in rows]),
                                            ("predict", [row["predict s"] for row in rows]), ("append, refit", refit))):
            share = 100 * np.array(values) / [row["step s"] for row in rows]
            axes.barh(labels, share, left=left, color=COLORS[i], label=name)
            left += share
        axes.axvline(3, color="#666666", linestyle="--", linewidth=1)
        axes.set_xlabel("% of a step (dashed: 3%)")
        axes.set_title(f"Cost of the probe, {rows[0]['rows']:,} rows")
        axes.legend(loc="best")
