"""Seconds of supervised updates on given texts whose lengths vary tenfold: packed rows, padded rows, and TRL's SFTTrainer.

  python experiments/benchmark.py texts [--model=DIR] [--count=32] [--shortest=32] [--row=1024] [--rounds=3] [--trl=PYTHON]

An update reads all texts once and makes one step of AdamW over all weights, in float32. Padded rows have the length of the
longest text; as many of them go through the model at a time as fill a packed row. The layouts take turns, after an update each
that compiles; --trl, a Python that has TRL, adds a process of its packed updates after each round, which warms up by one.
Without --model the model has random weights, SmolLM2's widths and --layers. Quote the ratios: seconds move with the machine.
"""
import statistics
import tempfile
import time
from pathlib import Path

from absl import app, flags

from jaxrl_llm.experiments.peers import text_work
from jaxrl_llm.experiments.peers.timed import run

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory that all programs load.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the model without --model.", lower_bound=1)
_COUNT = flags.DEFINE_integer("count", 32, "Texts of an update, a power of 2.", lower_bound=2)
_SHORTEST = flags.DEFINE_integer("shortest", 32, "Tokens of the shortest text, a tenth of the longest.", lower_bound=4)
_ROW = flags.DEFINE_integer("row", 1024, "Slots of a packed row.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed updates of each layout.", lower_bound=1)
_TRL = flags.DEFINE_string("trl", None, "Python that has TRL, for a comparison with its SFTTrainer; needs --model.")

PEERS = Path(__file__).parents[1] / "peers"


def rollouts_of():
    """The texts as a batch."""
    from jaxrl_llm.data.forest import paths
    from jaxrl_llm.data.text_forest import planted
    from jaxrl_llm.data.texts import Text
    from jaxrl_llm.tasks.base import Problem
    groups = [(Text(ids, labels >= 0, len(ids) // 2),) for ids, labels in text_work.texts(_COUNT.value, _SHORTEST.value)]
    problems = [Problem(str(number), "", number) for number in range(len(groups))]
    forest = planted(problems, groups, lambda rows: [""] * len(rows))
    return paths(forest, group=1, prompts=len(groups), version=0, tokens=lambda n: n, prompt_tokens=lambda n: n)


def layouts_of(rollouts):
    """`({name: (update, slots)}, first state)` of both layouts; an update takes a state, and returns the next and metrics."""
    import jax
    import numpy as np
    import optax

    from jaxrl_llm import advantages, objectives
    from jaxrl_llm.data.packing import of_groups, pack
    from jaxrl_llm.data.shapes import limits
    from jaxrl_llm.learning import layouts, state
    from jaxrl_llm.learning.policy import Policy
    from jaxrl_llm.models import ModelConfig, Transformer, weights

    if _MODEL.value:
        config, params = weights.load(_MODEL.value)
        model = Transformer(config)
    else:
        model = Transformer(ModelConfig(vocab_size=text_work.VOCABULARY, hidden_size=576, num_layers=_LAYERS.value, num_heads=9,
                                        num_kv_heads=3, head_dim=64, mlp_size=1536))
        params = jax.jit(model.init)(jax.random.key(0))
    policy, objective, optimizer = Policy(model), objectives.make("sft"), optax.adamw(1e-5)
    P, S, T = len(rollouts.mask), rollouts.prompt_mask.shape[1], rollouts.mask.shape[2]
    together = min(P, max(2 ** int(np.log2(max(_ROW.value // (S + T), 1))), 1))
    made = {"packed rows": layouts.packed(policy, objective, optimizer, (_ROW.value,), 1, clip_norm=None),
            "padded rows": layouts.rectangular(policy, objective, optimizer, limits(S, T, 1, 1), clip_norm=None,
                                               micro_batches=P // together, parts=P // together, together=together)}
    rows = pack(*of_groups(rollouts.prompt_tokens, rollouts.prompt_mask, rollouts.tokens, rollouts.mask), rollouts.mask,
                (_ROW.value,))
    slots = {"packed rows": rows.node.size, "padded rows": P * (S + T)}
    first = state.create(params, None, optimizer, advantages.make("reinforce"), objective, jax.random.key(1))
    credit = np.zeros(rollouts.mask.shape, np.float32)
    updates = {name: lambda now, layout=layout: layout.update(now, layout.ready(rollouts), credit)
               for name, layout in made.items()}
    return {name: (update, slots[name]) for name, update in updates.items()}, first


def timed(update, state) -> tuple[float, float, object, float]:
    """Seconds of an update, those of processors, the next state and the loss."""
    import jax
    began, used = time.perf_counter(), time.process_time()
    state, metrics = update(state)
    jax.block_until_ready(state)
    return time.perf_counter() - began, time.process_time() - used, state, float(metrics["loss"])


def line(name: str, seconds: list[float], base: float, rest: str) -> str:
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)}"
    return f"{name:12}{statistics.median(seconds):8.2f} s ({spread})  x {statistics.median(seconds) / base:.2f}  {rest}"


def main(_):
    if _TRL.value and not _MODEL.value:
        raise app.UsageError("--trl needs --model, a Hugging Face directory that both load")
    rollouts = rollouts_of()
    made, state = layouts_of(rollouts)
    tokens = int(rollouts.prompt_mask.sum() + rollouts.token_mask.sum())
    print(f"{_COUNT.value} texts of {_SHORTEST.value} to {10 * _SHORTEST.value} tokens, {tokens} in all", flush=True)
    for name, (update, _) in made.items():
        seconds, _, state, loss = timed(update, state)
        print(f"{name} compile and update in {seconds:.1f} s, loss {loss:.4f}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in made}
    used: dict[str, list[float]] = {name: [] for name in made}
    folder = Path(tempfile.mkdtemp(prefix="texts-"))
    for number in range(_ROUNDS.value):
        for name, (update, _) in made.items():
            seconds, busy, state, _ = timed(update, state)
            times[name].append(seconds)
            used[name].append(busy)
        if _TRL.value:
            environment = {"COUNT": _COUNT.value, "SHORTEST": _SHORTEST.value, "ROW": _ROW.value, "STEPS": 2,
                           "MODEL_DIR": Path(_MODEL.value).absolute(), "OUT_DIR": folder / "trl"}
            peer = run([_TRL.value, str(PEERS / "trl_sft.py")], {key: str(value) for key, value in environment.items()},
                       folder / f"{number}.log")
            times.setdefault("TRL packed", []).extend(peer["step_s"])
        print(f"round {number + 1}: {', '.join(f'{name} {each[-1]:.2f} s' for name, each in times.items())}", flush=True)
    base = statistics.median(times["packed rows"])
    for name, seconds in times.items():
        rest = f"{made[name][1]} slots, {statistics.median(used[name]):.2f} s of processors" if name in made else ""
        print(line(name, seconds, base, f"{tokens / statistics.median(seconds):,.0f} tokens/s  {rest}"))


if __name__ == "__main__":
    app.run(main)
