"""Time and memory of every advantage estimator under jit, as a table.

  python experiments/benchmark.py estimators [--prompts=1024 --group=16 --tokens=1024] [--only=grpo,rloo] [--json=out.json]

Memory is what the compiled program needs beyond its inputs and outputs, in copies of one f32[P, G, T] array. The inputs
are the random batches of the property tests (tests/properties), so every estimator has the extras that it needs.
"""
import json
import statistics
import sys
import time
from pathlib import Path

from absl import app, flags

_PROMPTS = flags.DEFINE_integer("prompts", 1024, "P, prompts in the batch.", lower_bound=1)
_GROUP = flags.DEFINE_integer("group", 16, "G, rollouts per prompt.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 1024, "T, tokens per rollout.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls per estimator; the median is reported.", lower_bound=1)
_ONLY = flags.DEFINE_list("only", None, "Estimators to measure (default: all).")
_JSON = flags.DEFINE_string("json", None, "Also write the rows to this file.")

PROPERTIES = Path(__file__).parents[2] / "tests" / "properties"


def measure(batch, case, slug: str, repeats: int) -> dict[str, float]:
    """Milliseconds per call (median) and to compile, and temporary memory in copies of f32[P, G, T]."""
    import jax
    import numpy as np
    import property_inputs as inputs

    from jaxrl_llm import advantages

    estimator = advantages.make(slug, **case.hyper)
    own = jax.tree.map(inputs.as_array, dict(case.inputs(np.random.default_rng(0), *batch.mask.shape)))
    rollouts, state = jax.block_until_ready((batch.replace(**own), estimator.init()))
    started = time.perf_counter()
    compiled = jax.jit(estimator.update).lower(rollouts, state).compile()
    compile_ms = 1e3 * (time.perf_counter() - started)
    jax.block_until_ready(compiled(rollouts, state))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(rollouts, state))
        times.append(1e3 * (time.perf_counter() - started))
    temporary = compiled.memory_analysis().temp_size_in_bytes / (4 * batch.mask.size)
    return {"ms": statistics.median(times), "temp_copies": float(temporary), "compile_ms": compile_ms}


def main(_):
    sys.path.insert(0, str(PROPERTIES))
    import jax
    import property_inputs as inputs

    from jaxrl_llm import advantages
    from jaxrl_llm.tools import registry

    shape = (_PROMPTS.value, _GROUP.value, _TOKENS.value)
    device = jax.devices()[0]
    print(f"P, G, T = {shape} on {device.device_kind} ({device.platform}), jax {jax.__version__}\n")
    print(f"{'estimator':32} {'ms':>10} {'temp/PGT':>10} {'compile ms':>12}")
    rows, cases, batch = [], inputs.load("ESTIMATORS"), inputs.batch(0, inputs.Case(), shape)
    for slug in _ONLY.value or advantages.names():
        registry.one_of("estimator", slug, advantages.names())
        try:
            row = {"estimator": slug, **measure(batch, cases.get(slug, [inputs.Case()])[0], slug, _REPEATS.value)}
            print(f"{slug:32} {row['ms']:10.3f} {row['temp_copies']:10.2f} {row['compile_ms']:12.0f}", flush=True)
        except Exception as error:  # one estimator out of memory must not hide the others
            row = {"estimator": slug, "error": f"{type(error).__name__}: {error}"}
            print(f"{slug:32} {row['error'].splitlines()[0][:80]}", flush=True)
        rows.append(row)
    if _JSON.value:
        report = {"shape": shape, "device": device.device_kind, "jax": jax.__version__, "rows": rows}
        Path(_JSON.value).write_text(json.dumps(report, indent=1) + "\n")
    failed = [row["estimator"] for row in rows if "error" in row]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    app.run(main)
