"""Half of a batch: it holds every living row whenever it says so, and what is taken out comes back to its place."""
import jax
import numpy as np
import pytest

from jaxrl_llm.engines.compaction import half, holds

SIZES = [(1, 2), (1, 8), (3, 1), (4, 1), (5, 3), (3, 4), (4, 6), (7, 2)]
HALF, HOLDS = jax.jit(half), jax.jit(holds)


def batches(P, G):
    random = np.random.default_rng(P * 10 + G)
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        for _ in range(20):
            yield random.uniform(size=(P, G)) < share


def fits(alive) -> bool:
    """By counting: each prompt needs as many half groups (whole ones, where G is odd) as its living rows fill."""
    P, G = alive.shape
    size = G if G % 2 else G // 2
    return sum(-(-count // size) for count in alive.sum(1)) <= -(-P * G // size // 2)


@pytest.mark.slow
@pytest.mark.parametrize("P,G", SIZES)
def test_a_half_holds_all_living_rows_when_it_says_so(P, G):
    said = []
    for alive in batches(P, G):
        part = jax.device_get(HALF(alive))
        assert part.rows.shape == ((P, G // 2) if G % 2 == 0 else (-(-P // 2), G)) and part.prompts.shape == part.rows.shape[:1]
        taken = list(zip(np.repeat(part.prompts, part.rows.shape[1]).tolist(), part.rows.ravel().tolist()))
        assert len(set(taken)) == len(taken)  # none twice
        kept = np.zeros((P, G), bool)
        kept[tuple(np.transpose(taken))] = True
        said.append(bool(HOLDS(alive)))
        assert said[-1] == fits(alive)
        assert kept[alive].all() or not said[-1]
    assert len(set(said)) == 2  # both happen


@pytest.mark.slow
@pytest.mark.parametrize("P,G", SIZES)
def test_what_is_taken_comes_back_to_its_place(P, G):
    x = jax.numpy.arange(P * G * 2).reshape(P, G, 2)
    for alive in batches(P, G):
        part = HALF(alive)
        again = np.asarray(part.put(x, -part.take(x)))
        np.testing.assert_array_equal(np.abs(again), x)
        assert (again[..., 1] < 0).sum() == part.rows.size
        if HOLDS(alive):
            assert (again[..., 1] < 0)[alive].all()


@pytest.mark.parametrize("rows", [(8, 0), (4, 4), (0, 8), (4, 3), (1, 4), (0, 0)])
def test_few_prompts_with_many_living_rows_fit_and_many_prompts_with_few(rows):
    assert holds(np.arange(8) < np.array(rows)[:, None])


def test_rows_that_do_not_fit():
    assert not holds(np.arange(8) < np.array([5, 1])[:, None])  # the living rows of one prompt need both halves of its group
    assert not holds(np.ones((2, 1), bool))
