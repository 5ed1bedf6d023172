"""Which generation requests may start under a bound on staleness."""

import pytest

from jaxrl_llm.control.staleness import admit


def test_worked_example():
    assert admit(97, batch_size=16, version=2, max_staleness=4)  # floor(96 / 16) = 6 <= 2 + 4
    assert not admit(113, batch_size=16, version=2, max_staleness=4)


@pytest.mark.parametrize("bound, first_refused", [(0, 9), (1, 17), (3, 33)])
def test_bound_counts_whole_batches_ahead_of_the_trainer(bound, first_refused):
    allowed = [n for n in range(1, 60) if admit(n, batch_size=8, version=0, max_staleness=bound)]
    assert allowed == list(range(1, first_refused))


def test_counting_starts_at_one():
    with pytest.raises(ValueError, match="request=0"):
        admit(0, batch_size=8, version=0, max_staleness=0)
