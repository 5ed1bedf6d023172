"""A learner of packed rows learns the same as one of rectangular rows, with few programs."""
import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm import parallel
from jaxrl_llm.data import forest
from jaxrl_llm.data.packing import pack
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.data.shapes import MAX_PROGRAMS
from jaxrl_llm.learning import layouts
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import guard

P, G = 4, 4
CASES = {
    "one update": ({}, 1), "at once": ({}, 64),
    "epochs, minibatches, a reference": ({"learner.epochs": 2, "learner.minibatches": 2, "objective": "+ kl(0.1)"}, 2),
    "ratios of sequences": ({"method": "gspo", "learner.epochs": 2}, 1),
    "adapters": ({"lora.rank": 2, "objective": "+ kl(0.1)", "learner.epochs": 2}, 1),
    "experts": ({"model.experts": 4}, 2),
    "a critic on the states of adapters": (
        {"method": "ppo", "critic.kind": "head", "lora.rank": 2, "learner.minibatches": 2}, 1),
}


def build(S, T, **changes):
    """A run of a tiny model whose optimiser moves the weights by the gradient itself."""
    c = default_config()
    c.task = "arithmetic(level=digit)"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 32, 2, 4, 48
    c.steps, c.prompts.per_step, c.prompts.max_tokens, c.sampling.group, c.sampling.max_tokens = 4, P, S, G, T
    c.optimizer.name, c.optimizer.learning_rate, c.optimizer.warmup_updates = "sgd", 0.1, 0
    c.update_from_flattened_dict(changes)
    run, params = setup.build(c)
    return run, setup.initial_state(run, params)


def batch(rng, S, T, lengths=None, prompts=None):
    """Rollouts `[P, G, T]` of random tokens: two are dropped, and one has a stretch that an environment wrote.

    The sampler's log-probs are NaN wherever nothing is trained.
    """
    lengths = rng.integers(1, T + 1, (P, G)) if lengths is None else np.broadcast_to(lengths, (P, G))
    prompts = rng.integers(1, S + 1, P) if prompts is None else np.broadcast_to(prompts, P)
    there, valid = np.arange(T) < lengths[..., None], np.ones((P, G), bool)
    valid[0, 1] = valid[2, 3] = False
    mask = there.copy()
    mask[1, 2, 1:3] = False
    role = np.where(mask, Role.POLICY, np.where(there, Role.ENVIRONMENT, Role.PADDING)).astype(np.int8)
    tokens, asked = rng.integers(0, 250, (P, G, T)), rng.integers(0, 250, (P, S))
    sampled = np.where(mask & valid[..., None], rng.normal(-5, 0.3, mask.shape), np.nan)
    return Rollouts(mask=mask, valid=valid, role=role, rewards=rng.normal(size=(P, G)).astype(np.float32),
                    tokens=tokens.astype(np.int32), prompt_tokens=asked.astype(np.int32),
                    prompt_mask=np.arange(S) < prompts[:, None],
                    behavior_logprobs=sampled.astype(np.float32))


def learned(S, T, given, changes):
    """`(weights at the start, weights, metrics of each step)` after a step on each of the given batches."""
    run, state = build(S, T, **changes)
    frozen, before, result = run.learner.frozen(state.params), jax.device_get((state.trainable, state.beside)), []
    for rollouts in given:
        state, metrics, *_ = run.learner.learn(state, rollouts, frozen)
        result.append(metrics)
    return before, jax.device_get((state.trainable, state.beside)), result


def assert_alike(ours, wanted):
    """Weights as near to each other as 1e-5 of what they moved, and the same metrics."""
    before, weights, steps = wanted
    moved = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(before)))
    assert moved > 1e-3
    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(moved, 1), rtol=0)
    for result, theirs in zip(ours[2], steps, strict=True):
        assert result.keys() == theirs.keys()
        for name in theirs.keys() - {"moe/max_load"}:  # last tokens are computed here, and prompts once more
            assert result[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_on_packed_rows_are_those_on_rectangular_ones(case):
    changes, size = CASES[case]
    rng = np.random.default_rng(0)
    given = [batch(rng, 8, 6), batch(rng, 8, 6)]
    assert_alike(learned(8, 6, given, {**changes, "learner.packed_rows": size}), learned(8, 6, given, changes))


@pytest.mark.slow
@pytest.mark.parametrize("size", (1, 64))
def test_temperatures_and_factors_of_the_rate(size):
    """What controllers set: log-probs of each prompt at its temperature, steps of another length."""
    rollouts = batch(np.random.default_rng(4), 8, 6).replace(temperature=np.float32([0.5, 1.0, 1.5, 2.0]))
    result = []
    for rows in (size, 0):
        run, state = build(8, 6, **{"learner.packed_rows": rows})
        placed, before = run.learner.place(rollouts), jax.device_get(state.params)
        logprobs = run.learner.layout.logprobs(state.params, None, placed)[0]
        advantages = run.learner.place(np.broadcast_to(rollouts.rewards[..., None], rollouts.mask.shape))
        state, metrics = run.learner.layout.update(state, placed, advantages, np.float32(0.5))
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
        result.append((np.asarray(logprobs)[rollouts.token_mask], moved, float(metrics["loss"])))
    (packed, moved, loss), (plain, wanted, expected) = result
    np.testing.assert_allclose(packed, plain, atol=1e-5)
    assert loss == pytest.approx(expected, rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), moved, wanted)
    assert max(np.abs(x).max() for x in jax.tree.leaves(wanted)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("changes", ({}, {"lora.rank": 2, "model.experts": 4}))
def test_features_are_those_of_rectangular_rows(changes):
    """Means over the last 3 tokens, in rows that may hold the end of a prompt and not its completions."""
    changes, result = {"method": "poise", "probe.layer": "0", "probe.pool": 3, "learner.epochs": 2, **changes}, []
    rollouts = batch(np.random.default_rng(4), 8, 6)
    for rows in (1, 64, 0):
        run, state = build(8, 6, **changes, **{"learner.packed_rows": rows})
        lora = jax.tree.map(lambda x: x + 0.1, state.lora)
        result.append(jax.device_get(run.learner.layout.features(state.params, lora, run.learner.place(rollouts))))
    mask, *packed, wanted = rollouts.token_mask, *result
    for logprobs, entropies, features in packed:
        np.testing.assert_allclose(logprobs[mask], wanted[0][mask], atol=1e-5)
        np.testing.assert_allclose(entropies[mask], wanted[1][mask], atol=1e-5)
        np.testing.assert_allclose(features[rollouts.valid], wanted[2][rollouts.valid], atol=1e-5)
    assert np.abs(wanted[2][..., :-3]).max(axis=(0, 1)).min() > 1e-4


def forked():
    """A forest of P prompts of 5 tokens, with G trajectories of 16 distinct tokens each, 21 in all.

    Two go on from one turn after the environment's answer, two begin with one hint.
    """
    problems = [Problem(f"q{p}", "0", p) for p in range(P)]
    first = 21 * np.arange(P)[:, None]
    result = forest.plant(problems, (first + np.arange(5)).tolist(), ("exact",), answers=True, turns=True)
    rng = np.random.default_rng(7)
    # parent among these nodes (-1: the prompt), trajectory, author, tokens
    nodes = ((-1, 0, Role.POLICY, 3), (0, 0, Role.ENVIRONMENT, 2), (1, 0, Role.POLICY, 3), (1, 1, Role.POLICY, 2),
             (-1, 2, Role.HINT, 1), (4, 2, Role.POLICY, 3), (4, 3, Role.POLICY, 2))
    parent, uid, role, length = map(np.array, zip(*nodes))
    N, M = len(nodes), length.sum()
    for p in range(P):
        result = forest.grow(
            result, np.where(parent < 0, p, len(result.uid) + parent), G * p + uid, dict(prompt=np.full(N, p), role=role,
            length=length, stopped=np.ones(N, bool), rewards=(rewards := rng.normal(size=N)), components=rewards[:, None],
            texts=["a"] * N, answers=[None] * N, tokens=first[p] + np.arange(5, 21), logprobs=rng.normal(-5, 0.3, M),
            entropies=np.ones(M), version=np.zeros(M), turn_rewards=np.zeros(N), turn_info=[{}] * N))
    return result


@pytest.mark.slow
@pytest.mark.parametrize("size", (1, P))
def test_what_forked_trajectories_share_is_computed_once_and_learned_from_by_each(monkeypatch, size):
    made, sampled = [], forked()
    rollouts = forest.paths(sampled, 2, group=G, prompts=P, tokens=lambda n: n, prompt_tokens=lambda n: n, version=0)
    assert rollouts.present.sum() > sampled.length[sampled.role != Role.PROMPT].sum()
    monkeypatch.setattr(layouts, "pack", lambda *given: (made.append(pack(*given)), made[-1])[1])
    wide = 6, 9  # limits at which a row has 42 slots, two trees
    assert_alike(learned(*wide, [rollouts], {"learner.packed_rows": size}), learned(*wide, [rollouts], {}))
    (packed,) = made
    assert (packed.node >= 0).sum() == len(sampled.tokens) == 21 * P and (packed.index >= 0).sum() == rollouts.mask.sum()


def whole_of(layout):
    """The program that updates with a single micro-batch."""
    return next(program for program in layout.update_programs if program.name == "whole")


@pytest.mark.slow
@pytest.mark.parametrize("minibatches, packings", ((1, 1), (2, 1 + 2 * 2)))
def test_a_batch_is_packed_once_for_all_that_reads_it_whole(monkeypatch, minibatches, packings):
    """Old and reference log-probs and two epochs; mini-batches of each epoch are other rows."""
    run, state = build(8, 6, **{"learner.packed_rows": 64, "objective": "+ kl(0.1)", "learner.epochs": 2,
                                "learner.minibatches": minibatches})
    made, read = [], []
    monkeypatch.setattr(layouts, "pack", lambda *given: (made.append(pack(*given)), made[-1])[1])
    layout, numbers = run.learner.layout, {"loss": 1.0, "skipped_updates": 0}
    layout.logprob_programs[0].function = lambda view, params, lora, rows, *_: (read.append(rows), view)[1]
    whole_of(layout).function = lambda state, rows, *_: (read.append(rows), (state, numbers))[1]
    frozen, rng = run.learner.frozen(state.params), np.random.default_rng(5)
    for count in (1, 2):
        state = run.learner.learn(state, batch(rng, 8, 6), frozen).state
        assert (len(made), len(read)) == (count * packings, count * (2 + 2 * minibatches))
    for rows in read[-2:] if minibatches == 1 else ():
        jax.tree.map(np.testing.assert_array_equal, rows, made[-1].rows)


def test_arrays_of_the_host_may_change_and_are_packed_anew():
    calls = []
    packing = layouts.remembers_last(lambda *given: calls.append(given))
    given = np.ones(2), None
    packing(*given), packing(*given)
    assert len(calls) == 2
    placed = jax.device_put(given[0]), None
    packing(*placed), packing(*placed), packing(jax.device_put(given[0]), None), packing(*placed)
    assert len(calls) == 5


@pytest.mark.slow
def test_long_prompts_with_few_tokens_of_completion_are_computed_once():
    rng = np.random.default_rng(1)
    given = [batch(rng, 100, 4, prompts=100, lengths=4)]
    run, _ = build(100, 4, **{"learner.packed_rows": 1})
    placed = []
    logprobs = run.learner.layout.logprob_programs[0]
    logprobs.function = lambda view, params, lora, rows, *_: (placed.append(rows), view)[1]
    run.learner.layout.logprobs(None, None, given[0])
    assert len(placed) == P and {rows.tokens.shape for rows in placed} == {(1, 100 + G * 4)}
    assert_alike(learned(100, 4, given, {"learner.packed_rows": 1}), learned(100, 4, given, {}))


@pytest.mark.slow
def test_a_run_compiles_no_more_programs_than_it_announces():
    """Over batches of all lengths, twice: the second time nothing compiles."""
    run, state = build(100, 60, **{"learner.packed_rows": 1, "learner.minibatches": 2})
    layout, rng = run.learner.layout, np.random.default_rng(2)
    lengths = [(longest, longest) for longest in (10, 40, 60, 10)] + [(60, 1)]
    kinds = layout.update_programs, layout.logprob_programs
    seen = []
    for _ in range(2):
        for longest, shortest in lengths:
            own = rng.integers(shortest, longest + 1, (P, G))
            own[:, 0] = longest
            rollouts = batch(rng, 100, 60, lengths=own, prompts=min(100, 2 * longest))
            state, metrics, *_ = run.learner.learn(state, rollouts)
            assert np.isfinite(metrics["loss"])
        seen.append((guard._counts.number, *(sum(len(one._seen) for one in kind) for kind in kinds)))
    assert seen[0] == seen[1] and seen[0][1] > 3  # several lengths of rows
    for count, kind in zip(seen[1][1:], kinds):
        assert count <= sum(one.shapes for one in kind) <= MAX_PROGRAMS


def test_log_probs_without_adapters_are_those_of_the_weights_alone():
    run, state = build(8, 6, **{"lora.rank": 2, "objective": "+ kl(0.1)"})
    rollouts = batch(np.random.default_rng(3), 8, 6)
    lora = jax.tree.map(lambda x: x + 0.1, state.lora)
    [reference] = [one for one in run.learner.recorders if one.name == "reference"]
    result = reference.record(None, state.params, lora, run.learner.place(rollouts))["ref_logprobs"]
    alone = jax.jit(run.learner.policy.logprobs)(state.params, None, rollouts)[0]
    np.testing.assert_array_equal(np.asarray(result)[rollouts.token_mask], np.asarray(alone)[rollouts.token_mask])


@pytest.mark.parametrize("changes, message", (
    ({"learner.micro_batches": 2}, "learner.packed_rows=2 and learner.micro_batches=2 both set .* set learner.micro_batches=1"),
    ({"learner.packed_rows": -1}, "learner.packed_rows is -1; it must be at least 0")))
def test_impossible_numbers_of_rows_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(8, 6, **{"learner.packed_rows": 2, **changes})


def test_rows_that_the_mesh_cannot_share_out_are_refused():
    c = default_config()
    c.learner.packed_rows = 3
    mesh = dataclasses.make_dataclass("Mesh", ["shape"])({"data": 2, "fsdp": 2})
    with pytest.raises(ValueError, match="learner.packed_rows=3 rows do not divide .* = 4 shards; use 4"):
        parallel.check_batch(mesh, c.learner.packed_rows, "learner.packed_rows", "rows")
