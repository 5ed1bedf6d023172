"""Tokens per second of the slot engine and of the scan sampler on the same trajectories, as a table.

  python experiments/benchmark_engine.py [--hidden=384] [--layers=4] [--slots=64] [--requests=512] [--repeats=3] [--clock=wall]

Both run in turn, the scan sampler in batches with as many rows as the engine has slots, prompts in groups of 8. Tokens are
drawn uniformly from the whole vocabulary (a very high temperature) and a share of it stops, so lengths depend on uids alone and
neither sampler knows them beforehand. The script checks that both give the same tokens. The table shows medians of the repeats,
after one that compiles, and how many programs each compiled that no case above needed, with the seconds that this took.
"""
import statistics
import time

from absl import flags

from jaxrl_llm.commands import command_line

_HIDDEN = flags.DEFINE_integer("hidden", 384, "Width of the model.", lower_bound=64)
_LAYERS = flags.DEFINE_integer("layers", 4, "Its layers.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 64, "Rows of the engine, and of a batch of the scan sampler.", lower_bound=8)
_REQUESTS = flags.DEFINE_integer("requests", 512, "Trajectories, a multiple of the slots.", lower_bound=8)
_LIMIT = flags.DEFINE_integer("limit", 128, "Most tokens of a completion.", lower_bound=8)
_PROMPT = flags.DEFINE_integer("prompt", 32, "Tokens of a prompt.", lower_bound=2)
_CLOCK = flags.DEFINE_enum("clock", "wall", ["wall", "processor"], "Seconds of the clock, or of all cores: on a busy machine.")
_PAGED = flags.DEFINE_bool("paged", False, "Caches of the engine in pages of one pool.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed turns of each; medians are reported.", lower_bound=1)

GROUP, VOCABULARY = 8, 1024
_COMPILED = "/jax/core/compile/backend_compile_duration"
EVERY_TOKEN_ALIKE = 1e9  # a temperature


def lengths_of(key, uids, stops: int):
    """Lengths of the completions of these uids if `stops` tokens of the vocabulary are stop tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.engines import Sampling, row_keys
    from jaxrl_llm.engines.sampling import draw

    @jax.jit
    def tokens(keys, logits):
        def step(_, t):
            step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, t)
            return None, draw(step_keys, logits, Sampling()).token
        return jax.lax.scan(step, None, jnp.arange(_LIMIT.value))[1].T

    stopped = np.asarray(tokens(row_keys(key, uids), np.zeros((len(uids), VOCABULARY), np.float32))) < stops
    return np.where(stopped.any(1), stopped.argmax(1) + 1, _LIMIT.value)


def stops_for(mean: float) -> int:
    """Number of stop tokens for completions of about this mean length."""
    def length(stops):
        p = stops / VOCABULARY
        return (1 - (1 - p) ** _LIMIT.value) / p
    return min(range(1, VOCABULARY), key=lambda stops: abs(length(stops) - mean))


def cases(key):
    """`name -> (uids, how many tokens stop)`"""
    import numpy as np
    limit, count = _LIMIT.value, _REQUESTS.value
    uids, stops = np.arange(count), stops_for(limit * 44 / 128)
    many = np.arange(20 * count)
    lengths = lengths_of(key, many, stops)
    long = many[lengths == limit][:round(0.05 * count)]
    tail = np.concatenate([long, many[lengths <= limit // 2][:count - len(long)]])
    return {"equal": (uids, 0), "geometric": (uids, stops),
            "5% at the limit, others half of it at most": (np.random.default_rng(0).permutation(tail), stops)}


def by_scan(model, params, key, prompts, uids, stops: int):
    """`uid -> tokens`, in batches."""
    import jax
    import numpy as np

    from jaxrl_llm.engines import Sampling, generate, row_keys
    completions = {}
    for start in range(0, len(uids), _SLOTS.value):
        rows = uids[start:start + _SLOTS.value].reshape(-1, GROUP)
        asked = prompts[start // GROUP:][:len(rows)]
        made = jax.device_get(generate(model, params, asked, np.ones(asked.shape, bool), row_keys(key, rows),
                                       Sampling(np.float32(EVERY_TOKEN_ALIKE)), max_tokens=_LIMIT.value,
                                       stop_ids=tuple(range(stops))))
        for uid, tokens, mask in zip(rows.reshape(-1), made.tokens.reshape(-1, _LIMIT.value), made.mask.reshape(rows.size, -1)):
            completions[int(uid)] = tokens[mask].tolist()
    return completions


def by_engine(engine, prompts, uids, stops: int):
    """`uid -> tokens`"""
    from jaxrl_llm.engines import Sampling
    from jaxrl_llm.engines.engine import Request
    sampling, ends = Sampling(EVERY_TOKEN_ALIKE), tuple(range(stops))
    engine.submit(*(Request(int(uid), _LIMIT.value, prompts[i // GROUP].tolist(), sampling=sampling, stop_tokens=ends)
                    for i, uid in enumerate(uids)))
    completions = {}
    while nodes := engine.collect():
        completions |= {node.uid: node.tokens.tolist() for node in nodes}
    return completions


def main():
    import jax
    import numpy as np

    from jaxrl_llm.engines.engine import SlotEngine
    from jaxrl_llm.models import ModelConfig, Transformer

    heads = _HIDDEN.value // 64
    model = Transformer(ModelConfig(vocab_size=VOCABULARY, hidden_size=_HIDDEN.value, num_layers=_LAYERS.value, num_heads=heads,
                                    num_kv_heads=max(heads // 3, 1), head_dim=64, mlp_size=_HIDDEN.value * 8 // 3))
    params, key = jax.jit(model.init)(jax.random.key(0)), jax.random.key(1)
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (_REQUESTS.value // GROUP, _PROMPT.value)).astype(np.int32)
    engine = SlotEngine(model, params, key, slots=_SLOTS.value, slot_tokens=_PROMPT.value + _LIMIT.value, paged=_PAGED.value)
    clock = {"wall": time.perf_counter, "processor": time.process_time}[_CLOCK.value]
    compiling: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiling.append(duration) if event == _COMPILED else None)
    print("| lengths | mean | scan, tokens/s | engine, tokens/s | ratio | scan compiles | engine compiles |")
    print("|---|---|---|---|---|---|---|")
    for name, (uids, stops) in cases(key).items():
        ways = {"scan": lambda: by_scan(model, params, key, prompts, uids, stops),
                "engine": lambda: by_engine(engine, prompts, uids, stops)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        compiled: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(_REPEATS.value + 1):
            outputs = {}
            for way, run in ways.items():
                engine.publish(0, params)  # drops its cached prompts
                before, began = len(compiling), clock()
                outputs[way] = run()
                seconds[way].append(clock() - began)
                compiled[way] += compiling[before:]
            if outputs["scan"] != outputs["engine"]:
                raise SystemExit(f"{name}: the engine's tokens are others than the scan sampler's")
        total = sum(map(len, outputs["scan"].values()))
        scan, own = (total / statistics.median(times[1:]) for times in seconds.values())
        programs = " | ".join(f"{len(durations)} in {sum(durations):.1f} s" for durations in compiled.values())
        print(f"| {name} | {total / len(uids):.0f} | {scan:,.0f} | {own:,.0f} | {own / scan:.2f} | {programs} |", flush=True)


if __name__ == "__main__":
    command_line.run(main)
