"""The table of optimisers: whose rule moves which weights, decay and schedules, states on a mesh and in a plan."""
import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.optimizers import TABLE, make_optimizer, updates_planned
from jaxrl_llm.models import ModelConfig, Transformer, lora
from jaxrl_llm.parallel.rules import path_name, spec_of
from jaxrl_llm.planning import plan

CONFIG = ModelConfig(vocab_size=256, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=32, mlp_size=256)
MODEL = Transformer(CONFIG)
ONE = {"data": 1, "fsdp": 1, "tensor": 1}
MESH = {"data": 2, "fsdp": 4, "tensor": 2}


@functools.cache
def params():
    return jax.tree.map(lambda x: x + 0.1, MODEL.init(jax.random.key(0)))


@functools.cache
def gradient():
    leaves, tree = jax.tree.flatten(params())
    random = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(random.standard_normal(x.shape), jnp.float32) for x in leaves])


def changes(name, steps=1, **settings):
    """An optimiser's last change of the weights in `steps` steps with the same gradient."""
    optimizer, _ = make_optimizer(1e-2, 10, name=name, **settings)
    step, state = jax.jit(optimizer.update), optimizer.init(params())
    for _ in range(steps):
        change, state = step(gradient(), state, params())
    return change


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_updates_are_counted_and_the_rate_is_the_schedules(name):
    """The first update has half of the rate, by the warm-up, and is half as large."""
    optimizer, schedule = make_optimizer(1e-2, 10, name=name, warmup_updates=2)
    state = optimizer.init(params())
    assert updates_planned(state) == 0
    change, state = jax.jit(optimizer.update)(gradient(), state, params())
    assert updates_planned(state) == 1 and float(schedule(0)) == pytest.approx(5e-3)
    for ours, full in zip(jax.tree.leaves(change), jax.tree.leaves(changes(name)), strict=True):
        np.testing.assert_allclose(ours, 0.5 * full, rtol=2e-5, atol=1e-9)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in TABLE.items() if "weight_decay" in kind.own])
def test_decay_takes_the_same_share_of_the_weights_in_all(name):
    """- learning rate x decay x weight, of every leaf, whichever rule moves it."""
    for with_decay, without, weights in zip(*map(jax.tree.leaves, (
            changes(name, weight_decay=0.5), changes(name), params())), strict=True):
        np.testing.assert_allclose(with_decay - without, -1e-2 * 0.5 * weights, rtol=1e-3, atol=2e-6)


def test_adamw_is_that_of_optax():
    optimizer, schedule = make_optimizer(1e-2, 10)
    plain = optax.adamw(schedule, weight_decay=0.0)
    assert jax.tree.structure(optimizer.init(params())) == jax.tree.structure(plain.init(params()))
    ours, theirs = (one.update(gradient(), one.init(params()), params())[0] for one in (optimizer, plain))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", ("sgd", "rmsprop"))
def test_momentum_adds_the_decayed_sum_of_earlier_changes(name):
    """Of the same gradient twice: change + 0.5 x the change before, with as many more numbers kept as there are weights."""
    first, second = (changes(name, steps) for steps in (1, 2))
    for moved, one, two in zip(*map(jax.tree.leaves, (changes(name, 2, momentum=0.5), first, second)), strict=True):
        np.testing.assert_allclose(moved, two + 0.5 * one, rtol=1e-6)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(
        make_optimizer(1e-2, 10, name=name, momentum=momentum)[0].init, params()))) for momentum in (0.0, 0.5)]
    assert sizes[1] - sizes[0] == sum(leaf.size for leaf in jax.tree.leaves(params()))


def test_every_optimiser_of_optax_can_be_named():
    """It gets the schedule and the settings that are given, and no others."""
    ours, schedule = make_optimizer(1e-2, 10, name="optax:nadamw", warmup_updates=2, b1=0.5, b2=-1.0, weight_decay=0.25)
    theirs = optax.nadamw(schedule, b1=0.5, weight_decay=0.25)
    result = [one.update(gradient(), one.init(params()), params())[0] for one in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *result)
    assert updates_planned(ours.init(params())) == 0 and float(schedule(0)) == pytest.approx(5e-3)


@pytest.mark.parametrize("name, message, settings", [
    ("adamww", "Unknown config.optimizer.name 'adamww'. Did you mean 'adamw'?", {}),
    ("no_such_module:sgd", "there is no module 'no_such_module'", {}), ("optax:", "names no function", {}),
    ("optax:yogii", "Did you mean 'yogi'?", {}), ("optax:constant_schedule", "takes", {}),
    ("optax:sgd", "takes", {"weight_decay": 0.1}), ("optax:apply_updates", "takes", {}),
    ("own_optimizers:none_at_all", "it must return", {}), ("sgd", "sgd has no b1", {"b1": 0.9})])
def test_what_is_no_optimiser_is_refused(name, message, settings, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "integration"))
    with pytest.raises(ValueError, match=re.escape(message)):
        make_optimizer(1e-2, 10, name=name, **settings)


def test_updates_are_counted_if_the_optimiser_counts_them():
    scheduled = optax.chain(optax.trace(0.9), optax.sgd(optax.constant_schedule(1.0)))
    for made, first, second in ((optax.sgd(1e-2), None, None), (optax.sgd(1e-2, momentum=0.9), None, None),
                                (optax.adam(1e-2), 0, 1), (scheduled, 0, 1)):
        state = made.init(params())
        assert updates_planned(state) == first
        assert updates_planned(made.update(gradient(), state, params())[1]) == second


def test_muon_orthogonalises_the_matrices_of_the_layers_one_by_one_and_adam_does_the_rest():
    change, adam = changes("muon", b2=0.95), changes("adamw", b2=0.95)
    for path, leaf in jax.tree.leaves_with_path(change):
        name = path_name(path)
        if not name.endswith("kernel"):
            beside = functools.reduce(lambda tree, key: tree[key.key], path, adam)
            # muon's Adam has Nesterov's momentum, which the first step of a constant gradient shows as a factor alone
            ratio = np.asarray(leaf) / np.asarray(beside)
            np.testing.assert_allclose(ratio, ratio.flat[0], rtol=1e-3, err_msg=name)
            continue
        for matrix in np.asarray(leaf, np.float64):
            values = np.linalg.svd(matrix, compute_uv=False) / (1e-2 * 0.2 * math.sqrt(max(matrix.shape)))
            # so far five iterations come, but for the smallest; those of a random matrix go from 0 to 2
            assert 0.6 < np.quantile(values, 0.05) and values.max() < 1.3, name


@pytest.mark.slow
def test_a_matrix_of_a_layer_is_moved_by_its_own_gradient():
    """Stacked matrices are no one matrix: that of the other layer changes nothing."""
    optimizer, _ = make_optimizer(1e-2, 10, name="muon")
    other = jax.tree.map(lambda x: x.at[1].multiply(3.0).at[1, 0].set(0.0) if x.ndim == 3 else x, gradient())
    result = [optimizer.update(g, optimizer.init(params()), params())[0]["layers"]["q"]["kernel"] for g in (gradient(), other)]
    np.testing.assert_allclose(result[0][0], result[1][0], atol=1e-7)
    assert np.abs(result[0][1] - result[1][1]).max() > 1e-4


def test_adafactors_moments_are_factored_over_the_two_axes_of_a_matrix():
    state = jax.eval_shape(make_optimizer(1e-2, 10, name="adafactor")[0].init, MODEL.abstract_params())
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(state)}
    assert (shapes["0/v_row/layers/down/kernel"], shapes["0/v_col/layers/down/kernel"]) == ((2, 128), (2, 256))
    assert shapes["0/v/layers/down/kernel"] == (1,) and shapes["0/v/layers/attention_norm/scale"] == (2, 128)


@pytest.mark.parametrize("name", TABLE)
def test_states_lie_as_their_parameters_or_whole(name):
    """As many numbers as the parameter of that path: its layout. Others are small, and whole."""
    where = {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(MODEL.abstract_params())}
    state = jax.eval_shape(make_optimizer(1e-2, 10, name=name)[0].init, MODEL.abstract_params())
    seen = 0
    for path, leaf in jax.tree.leaves_with_path(state):
        full = path_name(path)
        own = next((one for one in where if full.endswith(f"/{one}")), None)
        laid = spec_of(full, leaf.shape, MESH)
        if own is not None and leaf.shape == where[own].shape:
            seen += 1
            assert laid == spec_of(own, leaf.shape, MESH), full
        else:
            assert not tuple(laid) and leaf.size <= 2 * 256, full
    matrices, others, norms = 7, 4, 3  # Adafactor keeps as many numbers as weights of norms alone
    assert seen == {"adamw": 2 * (matrices + others), "adam": 2 * (matrices + others), "lion": matrices + others,
                    "rmsprop": matrices + others, "muon": matrices + 2 * others, "adafactor": norms, "sgd": 0}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("rank", (0, 4))
def test_the_plan_counts_the_bytes_of_the_state_that_runs(name, rank):
    optimizer, _ = make_optimizer(1e-2, 10, name=name)
    trained = params() if not rank else lora.init(jax.random.key(1), params(), rank, 1.0)
    measured = sum(leaf.nbytes for leaf in jax.tree.leaves(optimizer.init(trained)))
    work = plan.Work(8, 4, 16, 32, lora_rank=rank, optimizer=optimizer)
    assert plan.kept_memory(CONFIG, work, ONE)["optimiser"] == measured
    away = dataclasses.replace(work, offload=("optimizer",))
    assert plan.kept_memory(CONFIG, away, ONE)["optimiser"] == 0
    assert plan.update_memory(CONFIG, away, ONE)["optimiser from the host"] == measured


def test_moments_in_pieces_are_planned_in_pieces():
    held = [plan.state_memory(CONFIG, make_optimizer(1e-2, 10, name=name)[0], mesh) for name in ("adamw", "sgd", "adafactor")
            for mesh in (ONE, MESH)]
    weights = [plan.weights_per_device(CONFIG, mesh) for mesh in (ONE, MESH)]
    assert held[:2] == [8 * weights[0] + 8, 8 * weights[1] + 8] and held[2] == held[3] == 4 and held[4] == held[5]
    assert held[4] < 0.05 * held[0]


def test_only_adam_reports_the_noise_of_gradients():
    from jaxrl_llm.setup.config import default_config
    from jaxrl_llm.setup.resolve import resolve
    for name in TABLE:
        config = default_config()
        config.optimizer.name = name
        o = resolve(config, {}).optimizer
        state = make_optimizer(1e-2, 10, name=name)[0].init(params())
        assert optimizers.metrics(o, state).keys() == ({"adam_noise"} if name in ("adam", "adamw") else set())
