"""Routing: worked numbers, the two ends of beta, and dominance by brute force."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.values import routing

P = jnp.array([[0.9, 0.6, 0.3], [0.5, 0.45, 0.4]])
COST = jnp.array([10.0, 4, 1])


def test_example():
    np.testing.assert_allclose(routing.scaled_costs(COST), [1, 1 / 3, 0], rtol=1e-6)
    assert routing.route(P, COST, beta=0.5).tolist() == [2, 2]
    assert routing.route(P, COST, beta=0.8).tolist() == [0, 2]
    assert routing.route(P, COST, beta=1.0).tolist() == [0, 0] and routing.route(P, COST, beta=0.0).tolist() == [2, 2]
    assert routing.route(P, jnp.full(3, 7.0), beta=0.3).tolist() == [0, 0]
    assert routing.route(jnp.full((1, 3), 0.5), jnp.full(3, 7.0), beta=0.3).tolist() == [0]  # ties: the first
    per_prompt = jnp.array([[10.0, 4, 1], [1, 1, 1]])
    assert routing.route(P, per_prompt, beta=0.5).tolist() == [2, 0]


def test_curve_pays_for_what_it_chose():
    actual = np.array([[1, 1, 0], [1, 0, 0.5]])
    result = routing.curve(P, actual, COST, np.array([0.0, 0.8, 1.0]))
    np.testing.assert_allclose(result.score, [0.25, 0.75, 1.0])
    np.testing.assert_allclose(result.cost, [1, 5.5, 10])


def test_pareto_points_by_brute_force():
    rng = np.random.default_rng(0)
    cost, score = rng.integers(0, 6, 40).astype(float), rng.integers(0, 6, 40) / 5
    beaten = [any(c <= cost[i] and a >= score[i] and (c, a) != (cost[i], score[i]) for c, a in zip(cost, score))
              for i in range(40)]
    assert routing.pareto(cost, score).tolist() == [not b for b in beaten] and any(beaten) and not all(beaten)
