"""Time of a mixture of experts for each way to compute it, as a table: the basis of the choice in `kernels.grouped`.

  python experiments/benchmark.py experts [--repeats=5]

Milliseconds of a forward pass / of one with its gradients, the fastest of the repeats, float32 on the machine's own device.
"""
import time

from absl import app, flags

_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls; the fastest is reported.", lower_bound=1)

# tokens, experts per token, experts, width of the model, width of an expert: batches of training, then steps of decoding
SIZES = ((2048, 2, 8, 128, 256), (2048, 4, 16, 256, 256), (1024, 8, 64, 256, 128), (64, 2, 8, 128, 256), (8, 2, 8, 128, 256),
         (64, 8, 64, 256, 128), (8, 8, 64, 256, 128))


def milliseconds(function, arguments, repeats: int) -> float:
    import jax

    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


def by_ragged_dot(rows, weights, experts, gate, up, down):
    """As `moe.sorted_experts`, with the built-in product wherever it runs."""
    import jax
    import jax.numpy as jnp

    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=len(gate)).astype(jnp.int32)
    token = order // experts.shape[1]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows[token], gate, sizes)) * jax.lax.ragged_dot(rows[token], up, sizes)
    out = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[token].add(out)


def main(argv):
    del argv
    import jax

    from jaxrl_llm.models import moe

    ways = {"ragged_dot": by_ragged_dot, "all experts": lambda *a: moe.all_experts(*a, jax.nn.silu),
            "this library": lambda *a: moe.sorted_experts(*a, jax.nn.silu)}
    print(f"| tokens x k of E, D -> M | {' | '.join(ways)} |\n|---{'|---' * len(ways)}|")
    for n, k, E, D, M in SIZES:
        keys = jax.random.split(jax.random.key(0), 5)
        rows, *kernels = (jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, shape in zip(
            keys, ((n, D), (E, D, M), (E, D, M), (E, M, D))))
        weights, experts = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[4], (n, E))), k)
        cells = []
        for way in ways.values():
            gradient = jax.grad(lambda *a, way=way: (way(*a) ** 2).sum(), argnums=(0, 1, 3, 4, 5))
            arguments = (rows, weights, experts, *kernels)
            cells.append(" / ".join(f"{milliseconds(f, arguments, _REPEATS.value):.3g}" for f in (way, gradient)))
        print(f"| {n} x {k} of {E}, {D} -> {M} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
