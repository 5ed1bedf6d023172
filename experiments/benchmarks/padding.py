"""The share of padding in the computation of an update, by layout and by spread of lengths; from lengths alone, no model.

  python experiments/benchmark.py padding

One row for each spread of lengths: percent of the computed slots without a needed token, mean over batches; in brackets the
percent of the products of a query with a key in attention. A run uses 8 programs; 16 are all quarters of both lengths, and
64 are these with all quarters that may be filled.
"""
from collections.abc import Callable

import numpy as np
from absl import flags

from jaxrl_llm.commands import command_line

_BATCHES = flags.DEFINE_integer("batches", 40, "Batches that are drawn of each spread.")
_PROMPTS, _GROUP, _PARTS = 32, 8, 4  # of a batch; parts whose padding is removed together
_LIMITS = ((512, 1024), (4096, 256))  # prompt and completion tokens
SPREADS: dict[str, Callable] = {  # shares of a limit
    "uniform": lambda rng, size: rng.uniform(0, 1, size),
    "heavy tail": lambda rng, size: np.minimum(rng.lognormal(np.log(1 / 16), 1.2, size), 1),
    "all short": lambda rng, size: rng.uniform(0, 1 / 4, size),
    "all full": lambda rng, size: np.ones(size),
}


def rectangular(prompts, lengths, sizes) -> tuple[int, int]:
    """Slots and products that are computed: those of the whole shape, or the filled quarters if padding is removed."""
    from jaxrl_llm.data.ladders import smallest
    from jaxrl_llm.data.shapes import quarters_filled
    (P, G), S, T = lengths.shape, smallest(sizes.prompt_tokens, prompts.max()), smallest(sizes.tokens, lengths.max())
    filled = max(sizes.filled_of(T), quarters_filled(np.arange(T) < lengths[..., None], P // _PARTS))
    return P * S + -(-P * G * T * filled // 4), P * (S * S + G * T * (S + T))


def packed(prompts, lengths, S: int, T: int) -> tuple[int, int]:
    """The same of packed rows, one at a time."""
    from jaxrl_llm.data.packing import of_groups, pack
    from jaxrl_llm.data.shapes import row_lengths
    there, asked = np.arange(T) < lengths[..., None], np.arange(S) < prompts[:, None]
    tokens = there * np.arange(1, 1 + lengths.shape[1])[:, None]  # no two completions begin alike
    rows = pack(*of_groups(asked * 1, asked, tokens, there), there, row_lengths(S, T, _GROUP)).node
    return rows.size, rows.size * rows.shape[1]


def shares(spread: Callable, S: int, T: int) -> dict[str, tuple[float, float]]:
    """Percent of slots and of products that are padding, by layout; a causal half of the products counts as needed."""
    from jaxrl_llm.data.ladders import buckets, prompt_buckets
    from jaxrl_llm.data.shapes import Ladders, padded, unpadded
    rng, percents = np.random.default_rng(0), {}
    def quarters(least):
        return Ladders(prompt_buckets(S), buckets(T, 4), (1,), (least,) * 4)
    layouts = {"padded, 16": quarters(4), "padded, 8": padded(S, T, _GROUP, 1), "left out, 64": quarters(1),
               "left out, 8": unpadded(S, T, _GROUP, 1)}
    for _ in range(_BATCHES.value):
        prompts = np.maximum(1, spread(rng, _PROMPTS) * S).astype(int)
        lengths = np.maximum(1, spread(rng, (_PROMPTS, _GROUP)) * T).astype(int)
        needed = prompts.sum() + lengths.sum(), (prompts**2).sum() + (lengths * (lengths + prompts[:, None])).sum()
        def padding(computed):
            return [100 * (1 - n / c) for n, c in zip(needed, computed)]
        for name, sizes in layouts.items():
            percents.setdefault(name, []).append(padding(rectangular(prompts, lengths, sizes)))
        percents.setdefault("packed, 8", []).append(padding(packed(prompts, lengths, S, T)))
    return {name: tuple(np.mean(values, axis=0)) for name, values in percents.items()}


def main():
    rows = [(f"S={S}, T={T}, {name}", shares(spread, S, T)) for S, T in _LIMITS for name, spread in SPREADS.items()]
    names = [*rows[0][1]]
    print("\n".join([f"| limits, lengths | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]))
    for name, percents in rows:
        print(f"| {name} | {' | '.join(f'{slots:.0f} ({products:.0f})' for slots, products in map(percents.get, names))} |")


if __name__ == "__main__":
    command_line.run(main)
