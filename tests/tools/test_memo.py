"""Equal arguments, one object; what cannot be hashed, and what users write, is made anew."""
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.learning import optimizers
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.memo import remembered


def test_equal_arguments_give_the_same_object_and_unhashable_ones_a_new_one():
    @remembered(2)
    def make(*args, **kwargs):
        return [args, kwargs]

    assert make(1, a=2) is make(1, a=2) and make(1) is not make(1.0)
    assert make(([1],)) is not make(([1],)) and make(a=[1]) == [(), {"a": [1]}]


def test_parts_and_optimisers_with_equal_numbers_are_one():
    assert advantages.make("grpo", eps=0.1) is advantages.make("grpo", eps=0.1) is not advantages.make("grpo", eps=0.2)
    assert objectives.make("ppo_clip") is objectives.make("ppo_clip")
    for one, other in zip(*(optimizers.make_optimizer(1e-3, 9, b1=0.9) for _ in range(2)), strict=True):
        assert one is other
    with pytest.raises(ValueError):
        advantages.make("grpo", epsilon=0.1)


def test_factories_of_users_are_called_each_time():
    """They may read a global that a notebook has changed."""
    table, numbers = registry.PartTable("estimator", float, pure=True), [1]

    def mine(*, scale: float = 2.0):
        return numbers[0] * scale

    table.enter(mine)
    assert table.make("mine") == 2
    numbers[0] = 3
    assert table.make("mine") == 6
