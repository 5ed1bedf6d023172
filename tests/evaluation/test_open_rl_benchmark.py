"""Curves on a common grid in worked numbers."""
import numpy as np
import pytest

from jaxrl_llm.evaluation import open_rl_benchmark as benchmark

RUNS = [(np.arange(6), np.array([0.0, 1, 2, 3, 4, 5])), (np.arange(6), np.array([0.0, 2, 2, 4, 4, 6]))]


def test_a_worked_example():
    x, y = benchmark.on_common_grid(RUNS, 5, window=3)
    np.testing.assert_array_equal(x, [0, 1.25, 2.5, 3.75, 5])
    np.testing.assert_allclose(y.mean(0), [0, .854167, 1.75, 2.958333, 4.333333], atol=5e-7)
    np.testing.assert_allclose(y.std(0), [0, .229167, .25, .208333, .333333], atol=5e-7)
    last = [benchmark.last_mean(run, 3) for _, run in RUNS]
    assert np.mean(last) == pytest.approx(4.3333, abs=5e-5) and np.std(last) == pytest.approx(.3333, abs=5e-5)


def test_the_grid_ends_where_the_shortest_run_does():
    short = (np.array([0.0, 2.0]), np.array([7.0, 9.0]))
    x, y = benchmark.on_common_grid([RUNS[0], short], 3)
    np.testing.assert_array_equal(x, [0, 1, 2])
    np.testing.assert_array_equal(y, [[0, 1, 2], [7, 8, 9]])
    assert benchmark.last_mean(np.array([1.0, 3.0]), 100) == 2


def test_nothing_to_draw_is_an_error():
    for runs in ([], [(np.zeros(0), np.zeros(0))]):
        with pytest.raises(ValueError, match="one run at least"):
            benchmark.on_common_grid(runs, 3)
