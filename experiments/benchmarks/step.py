"""The time of each phase of a training step, compared with the limits of the machine.

  python experiments/benchmark.py step [--config=configs/arithmetic.py:smollm2] [--steps=5] [--prompt_words=215]
      [--config.prompts.per_step=4 --config.sampling.group=16 --config.sampling.max_tokens=128 ...] [--json=out.json]
      [--profile=DIR]

Real steps of the training loop with the stop token ignored, so that every step samples exactly P x G x T tokens; --stopping
gives completions of unequal length. Rates are useful operations (jaxrl_llm.evaluation.flops: no padding, no recomputation) per
second, and shares are of the matrix product rate (in decoding: that of products with its number of rows) and the memory
bandwidth measured in the same process. --profile writes a trace for Perfetto or TensorBoard.
"""
import contextlib
import dataclasses
import functools
import itertools
import json
import resource
import statistics
import time
import zlib
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_CONFIG = config_flags.DEFINE_config_file("config", "configs/arithmetic.py:smollm2", "Configuration of the measured step.")
_STEPS = flags.DEFINE_integer("steps", 5, "Timed steps after one that compiles; medians are reported.", lower_bound=1)
_PROMPT_WORDS = flags.DEFINE_integer("prompt_words", 0, "Filler words that lengthen each prompt.", lower_bound=0)
_STOPPING = flags.DEFINE_float("stopping", 0.0, "Share of the vocabulary that ends completions. With "
                               "--config.sampling.temperature=1000 lengths are geometric with a mean of about 1 / stopping.",
                               lower_bound=0.0, upper_bound=1.0)
_PHASES = flags.DEFINE_bool("phases", True, "Also time the parts of a step by themselves, against the machine's limits.")
_JSON = flags.DEFINE_string("json", None, "Also write the results to this file (not with --nophases).")
_PROFILE = flags.DEFINE_string("profile", None, "Write a trace of one more step into this folder (not with --nophases).")


def questions(words: int):
    """The chat problems `What is a + b?` of digits, each behind this number of other words."""
    from jaxrl_llm.tasks import Problem
    filler = "Read this first. " + "word " * words if words else ""
    pairs = itertools.product(range(10), repeat=2)
    return [Problem(({"role": "user", "content": f"{filler}What is {a} + {b}? Answer with just the number."},), str(a + b), i)
            for i, (a, b) in enumerate(pairs)]


def seconds_of(function, *arguments, repeats: int = 5) -> float:
    """Median seconds of a compiled call."""
    import jax
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def machine(dtype, rows: int, width: int):
    """A function that measures the device: operations per second of matrix products, bytes per second of a sum.

    Two products are timed: a square one, and one of `rows` rows of `width` with a matrix of many columns, in the better of its
    two orders. With so few rows no product reaches the rate of a square one.
    """
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.kernels.products import row_matmul
    large = jax.default_backend() != "cpu"
    n, count, columns = (8192, 2**30, 2**28 // width) if large else (2048, 2**27, 2**25 // width)
    product, rows_last, total = jax.jit(jnp.matmul), jax.jit(row_matmul), jax.jit(jnp.sum)

    def measure() -> dict[str, float]:
        # Random numbers, as accelerators multiply equal ones faster.
        square, few, matrix = (jax.random.normal(jax.random.key(0), shape, dtype)
                               for shape in ((n, n), (rows, width), (columns, width)))
        orders = seconds_of(product, few, matrix.T), seconds_of(rows_last, few, matrix)
        return {"gemm_flops_per_s": 2 * n**3 / seconds_of(product, square, square),
                "rows_flops_per_s": 2 * rows * columns * width / min(orders),
                "bytes_per_s": 4 * count / seconds_of(total, jnp.ones(count, jnp.float32))}

    return measure


def build():
    """`(run, state, sampling program)` of the configuration, with the benchmark's own prompts and stop tokens."""
    from jaxrl_llm.engines import scan
    from jaxrl_llm.engines.base import Wanted
    from jaxrl_llm.engines.prompts import encode_problem
    from jaxrl_llm.rewards import Reward, combine
    from jaxrl_llm.setup import setup
    from jaxrl_llm.tasks.loader import batches
    config = _CONFIG.value
    run, params = setup.build(config)
    problems = questions(_PROMPT_WORDS.value)
    longest = max(len(encode_problem(problem, run.source.stream.tokenizer)) for problem in problems)
    stops = tuple(range(round(_STOPPING.value * run.learner.policy.model.config.vocab_size)))
    distinct = Reward("distinct", lambda completion, *_: zlib.crc32(completion.encode()) / 2**32)  # or updates skip prompts
    stream, model = run.source.stream, run.learner.policy.model
    wanted = Wanted(model, run.learner.mesh, stream.tokenizer, stream.prompts, stream.group, config.sampling.micro_batches,
                    longest, config.sampling.max_tokens, stops, ())
    program = scan.program_of(wanted)
    stream = stream.apart(kind=scan.kind(wanted, program), prompt_tokens=longest, stop_ids=stops,
                          partner=stream.partner.scoring(combine([distinct])))
    source = dataclasses.replace(run.source, stream=stream, data=batches(problems, config.prompts.per_step, seed=0))
    return dataclasses.replace(run, source=source), setup.initial_state(run, params), program


def step(run, state):
    """One step of a run: `(state, the rollouts, seconds per phase)`."""
    from jaxrl_llm.tools.timer import PhaseTimer
    timer = PhaseTimer()
    began = time.perf_counter()
    rollouts = run.source.next(run.learner.publish(state), timer).rollouts
    state = run.learner.learn(state, rollouts, timer=timer).state
    return state, rollouts, timer.collect() | {"time/step": time.perf_counter() - began}


def prefill_seconds(run, state, rollouts) -> float:
    import jax
    prefill = jax.jit(lambda params, tokens, mask: run.learner.policy.model.prefill(params, tokens, mask, lora=state.lora))
    return seconds_of(prefill, state.params, rollouts.prompt_tokens, rollouts.prompt_mask)


def record_seconds(run, state, rollouts) -> float:
    from jaxrl_llm.recorders.base import texts_of
    return seconds_of(run.learner.layout.logprobs, state.params, state.lora, texts_of(rollouts), repeats=2)


def decode_floor(architecture, work, prompts: list[int], lengths: list[list[int]], limits: dict[str, float]) -> float:
    """The minimum seconds of decoding: products with the weights and attention, in turn, since each needs the other.

    Each takes the longer of its operations and its reads: all weights in each step; of the caches, the prompt's once per group
    and a completion's up to its current length. Products with the weights run at the rate for the batch's number of rows.
    """
    from jaxrl_llm.evaluation import flops
    rate, bandwidth = limits["gemm_flops_per_s"], limits["bytes_per_s"]
    weights, steps = flops.matmul_parameters(architecture), [[n - 1 for n in own] for own in lengths]
    rows = [sum(n > t for own in steps for n in own) for t in range(max(map(max, steps)))]  # rows that decode in step t
    products = sum(max(2 * weights * n / limits["rows_flops_per_s"], weights * work.itemsize / bandwidth) for n in rows)
    attention = sum(flops.attention_flops(architecture, n, before=p) for p, own in zip(prompts, steps) for n in own)
    return products + max(attention / rate, cache_bytes(architecture, work, prompts, lengths) / bandwidth)


def cache_bytes(architecture, work, prompts: list[int], lengths: list[list[int]]) -> float:
    """The minimum bytes read of the caches: in each step a prompt's once per group, a completion's up to its current length."""
    steps = [[n - 1 for n in own] for own in lengths]
    positions = sum(max(own) * p + sum(n * (n + 1) // 2 for n in own) for p, own in zip(prompts, steps))
    return positions * architecture.num_layers * work.cached_token(architecture)


def decode_bytes(architecture, work, prompts: list[int], lengths: list[list[int]]) -> float:
    """The minimum bytes of decoding: all weights in each step, and the caches."""
    from jaxrl_llm.evaluation import flops
    weights = (max(map(max, lengths)) - 1) * flops.matmul_parameters(architecture) * work.itemsize
    return weights + cache_bytes(architecture, work, prompts, lengths)


def rows_of(run, times: dict[str, float], rollouts, limits) -> list[dict]:
    """One row per phase: seconds, tokens, useful operations and the share of the machine's limit."""
    from jaxrl_llm.evaluation import flops
    from jaxrl_llm.setup.forecast import work_of
    model, c = run.learner.policy.model, run.config
    architecture = model.config
    prompts, work = rollouts.prompt_mask.sum(-1).tolist(), work_of(c, rollouts.prompt_mask.shape[1], set(), critic=False)
    rate = limits["gemm_flops_per_s"]
    lengths = rollouts.present.sum(-1).tolist()
    logits = 2 * architecture.vocab_size * architecture.hidden_size
    packed = sum(flops.packed_flops(architecture, p, [n - 1 for n in own]) + logits * len(own)  # layers skip last tokens
                 for p, own in zip(prompts, lengths))
    decode = sum(flops.decode_flops(architecture, p, n) for p, own in zip(prompts, lengths) for n in own)
    updates = c.learner.epochs * 3 * packed
    floor = functools.partial(decode_floor, architecture, work, prompts, lengths)
    square = floor(limits | {"rows_flops_per_s": rate}) / times["decode"]

    def row(name, seconds, tokens, operations, least):
        return {"phase": name, "seconds": seconds, "tokens_per_s": tokens / seconds if tokens else None,
                "gflop_per_s": operations / seconds / 1e9 if operations else None,
                "share_of_limit": least / seconds if operations else None}

    prefill = sum(flops.packed_flops(architecture, p - 1, [1]) for p in prompts)  # logits of the last token only
    completion_tokens = sum(map(sum, lengths))
    learned = sum(prompts) + completion_tokens
    return [
        row("prefill", times["prefill"], sum(prompts), prefill, prefill / rate),
        row("decode", times["decode"], completion_tokens, decode, floor(limits)) | {
            "share_by_square_products": square,
            "gb_per_s": decode_bytes(architecture, work, prompts, lengths) / times["decode"] / 1e9},
        row("record" if times["recorded"] else "record (not part of this step)", times["record"], learned, packed,
            packed / rate),
        row("update", times["update"], learned, updates, updates / rate),
        row("host", times["host"], 0, 0, 0),
        row("step", times["step"], completion_tokens, prefill + decode + updates, 0) | {"share_of_limit": None},
    ]


def main():
    import jax

    from jaxrl_llm.setup.start import DTYPES
    run, state, program = build()
    c, device = run.config, jax.devices()[0]
    measure = machine(DTYPES[c.model.dtype], c.prompts.per_step * c.sampling.group, run.learner.policy.model.config.hidden_size)
    began = time.perf_counter()
    state, rollouts, _ = step(run, state)
    first, timings, measured = time.perf_counter() - began, [], []
    print(json.dumps({"step": 0, "step_s": round(first, 3)}), flush=True)  # the step that compiles
    compiled = program, *run.learner.layout.update_programs, *run.learner.layout.logprob_programs
    compiling = sum(one.compile_seconds for one in compiled)
    for number in range(_STEPS.value):
        if _PHASES.value:
            measured.append(measure())  # before every step: other tenants of the machine come and go
        state, rollouts, times = step(run, state)
        timings.append(times)
        print(json.dumps({"step": number + 1, "step_s": round(times["time/step"], 3),
                          "rollout_s": round(times["time/rollout"], 3)}), flush=True)
    if not _PHASES.value:
        return
    if _PROFILE.value:
        with jax.profiler.trace(_PROFILE.value):
            state, rollouts, _ = step(run, state)
        print(f"trace: {_PROFILE.value}")
    measured.append(measure())
    limits = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    with contextlib.suppress(AttributeError, KeyError, TypeError):  # CPUs report none
        peak = device.memory_stats()["peak_bytes_in_use"] / 1e9
    median = {name.removeprefix("time/"): statistics.median(t.get(name, 0.0) for t in timings) for name in timings[0]}
    prefill = prefill_seconds(run, state, rollouts)
    recorded = bool(run.learner.recorders)
    times = {"prefill": prefill, "decode": median["rollout"] - prefill, "record": record_seconds(run, state, rollouts),
             "recorded": recorded, "update": median["update"], "step": median["step"],
             "host": statistics.median(t["time/step"] - t["time/rollout"] - t["time/update"]
                                       - recorded * t.get("time/record", 0) for t in timings)}
    results = {
        "work": {"prompts": c.prompts.per_step, "group": c.sampling.group, "tokens": c.sampling.max_tokens,
                 "prompt_tokens": run.source.stream.prompt_tokens, "dtype": c.model.dtype,
                 "micro_batches": c.learner.micro_batches},
        "device": f"{device.device_kind} x {jax.device_count()}", "jax": jax.__version__,
        "limits": limits,
        "first_step_s": first, "compile_s": compiling, "peak_memory_gb": peak,
        "step_s": [t["time/step"] for t in timings], "phases": rows_of(run, times, rollouts, limits),
    }
    show(results)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=1))


def show(results: dict) -> None:
    """Prints the results as a table."""
    from rich.console import Console
    from rich.table import Table
    w, limits = results["work"], results["limits"]
    table = Table(title=f"{w['prompts']} x {w['group']} x {w['tokens']}, prompts <= {w['prompt_tokens']}, {w['dtype']}, "
                        f"{results['device']}, jax {results['jax']}")
    for name in ("phase", "seconds", "tokens/s", "GFLOP/s", "share of limit"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    def text(value, form):
        return "" if value is None else format(value, form)
    for row in results["phases"]:
        table.add_row(row["phase"], f"{row['seconds']:.3f}", text(row["tokens_per_s"], ",.0f"),
                      text(row["gflop_per_s"], ",.0f"), text(row["share_of_limit"], ".0%"))
    console = Console(width=110)
    console.print(table)
    decode = next(row for row in results["phases"] if row["phase"] == "decode")
    def rate(name):
        return f"{limits[name + '_flops_per_s'] / 1e9:,.0f} GFLOP/s"
    console.print(f"matrix products {rate('gemm')}, those of {w['prompts'] * w['group']} rows {rate('rows')}; memory "
                  f"{limits['bytes_per_s'] / 1e9:,.1f} GB/s; decode: {decode['share_by_square_products']:.0%} of what square "
                  f"products and memory allow, weights and caches read at {decode['gb_per_s']:,.1f} GB/s; peak memory "
                  f"{results['peak_memory_gb']:.1f} GB; first step {results['first_step_s']:.1f} s of which "
                  f"{results['compile_s']:.1f} s in the compiler or its cache",
                  highlight=False)


if __name__ == "__main__":
    command_line.run(main)
