"""A function may compile once for each allowed signature, and never again."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.tools.guard import Guarded, RecompilationError


def test_one_shape_compiles_once_and_runs_on():
    guarded = Guarded("double", jax.jit(lambda x: 2 * x + 0.125))
    for value in (1.0, 2.0, 3.0):
        assert guarded(np.full(5, value, np.float32)).tolist() == [2 * value + 0.125] * 5
    assert guarded.compile_seconds > 0


def test_a_second_shape_fails_and_is_named():
    guarded = Guarded("double", jax.jit(lambda x: 2 * x["a"]))
    guarded({"a": np.zeros(3, np.float32)})
    with pytest.raises(RecompilationError, match=r"double was called with a new shape .*'a'.*float32\[3\] -> float32\[4\]"):
        guarded({"a": np.zeros(4, np.float32)})
    with pytest.raises(RecompilationError, match=r"float32\[3\] -> int32\[3\]"):
        guarded({"a": np.zeros(3, np.int32)})
    guarded({"a": np.ones(3, np.float32)})  # the known shape still works


def test_as_many_shapes_as_allowed():
    guarded = Guarded("double", jax.jit(lambda x: 2 * x), shapes=2)
    for size in (3, 4, 3, 4):
        guarded(np.zeros(size, np.float32))
    with pytest.raises(RecompilationError, match=r"2 allowed\): .*float32\[4\] -> float32\[5\]"):
        guarded(np.zeros(5, np.float32))


def test_what_is_static_in_an_argument_counts():
    batch = Rollouts(mask=np.ones((1, 1, 3), bool), valid=np.ones((1, 1), bool))
    guarded = Guarded("sum", jax.jit(lambda batch: batch.mask.sum() * batch.filled), shapes=2)
    assert [int(guarded(batch.replace(filled=n))) for n in (4, 2, 4, 2)] == [12, 6, 12, 6]
    with pytest.raises(RecompilationError, match=r"2 allowed\): what is static in it changed"):
        guarded(batch.replace(filled=3))


def test_compiling_again_for_a_known_signature_fails():
    guarded = Guarded("plus", jax.jit(lambda x: x + 0.375))
    guarded(jnp.zeros(6))
    jax.clear_caches()  # as a lost cache would be: same shapes, another compilation
    with pytest.raises(RecompilationError, match="plus compiled again"):
        guarded(jnp.zeros(6))


def test_a_changed_sharding_is_caught():
    if len(jax.devices()) > 1:
        pytest.skip("written for one device")
    guarded = Guarded("times", jax.jit(lambda x: x * 0.625))
    guarded(jnp.zeros(6))  # uncommitted
    mesh = jax.make_mesh((1,), ("data",))
    committed = jax.device_put(jnp.zeros(6), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    with pytest.raises(RecompilationError, match="sharding"):
        guarded(committed)


def test_two_guards_do_not_count_each_other():
    first, second = Guarded("a", jax.jit(lambda x: x - 0.25)), Guarded("b", jax.jit(lambda x: x - 0.75))
    first(np.zeros(7, np.float32))
    second(np.zeros(7, np.float32))
    first(np.ones(7, np.float32))
