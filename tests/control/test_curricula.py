"""The choice of the next problems: the papers' worked examples, passes without gaps, no starvation, and states that resume."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_task import alone

from jaxrl_llm import control, methods
from jaxrl_llm.advantages.kimi_opmd import length_reward
from jaxrl_llm.control import drive, kimi_sampling, passes, qwenlong_l1, siri, staged_problems, sws, sws_domains, vade
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.phases import phases_of

close = np.testing.assert_allclose
SEED = jax.random.key_data(jax.random.key(3))


def facts(tried, right=None, step=0):
    return {"step": jnp.int32(step), "tried": jnp.asarray(tried, jnp.int32),
            "right": jnp.zeros(len(tried), jnp.int32) if right is None else jnp.asarray(right, jnp.int32)}


def asked(ids, problems, group=8, rates=None):
    """The facts of a step in which each of `ids` has a group, with the share of right completions of each problem."""
    tried = np.zeros(problems, np.int32)
    for i in np.asarray(ids)[np.asarray(ids) >= 0]:
        tried[i] += group
    return facts(tried, np.zeros_like(tried) if rates is None else np.round(tried * np.asarray(rates)))


# --- passes


def test_a_pass_has_each_problem_once():
    """Seven problems in batches of three: every seven draws have each problem once, and every pass has another order."""
    walk, drawn = passes.start(alone(7), 3, SEED), []
    for _ in range(14):
        assert len(set(walk.ids.tolist())) == 3
        drawn += walk.ids.tolist()
        walk = passes.advance(walk, asked(walk.ids, 7)["tried"], jnp.ones(7, bool))
    orders = [tuple(drawn[k:k + 7]) for k in range(0, 42, 7)]
    assert all(sorted(order) == list(range(7)) for order in orders) and len(set(orders)) > 1


def test_excluded_problems_do_not_return_and_too_few_leave_gaps():
    kept = jnp.array([1, 0, 1, 0, 0], bool)
    walk = passes.start(alone(5), 3, SEED, kept)
    for _ in range(3):
        assert sorted(walk.ids.tolist()) == [-1, 0, 2]
        walk = passes.advance(walk, jnp.zeros(5, jnp.int32), kept)  # every proposed problem counts as visited, sampled or not
    assert walk.visits.tolist() == [3, 0, 3, 0, 0]
    assert passes.start(alone(2), 4, SEED).ids.tolist()[2:] == [-1, -1]


def test_a_pass_has_each_tasks_share():
    """Tasks of 40, 6 and 2 problems with weights 1, 2 and 1: a batch of eight has 2, 4 and 2, and each has its own passes.

    In batches of three every task has its share in the mean. A task without further problems leaves its share to the others.
    """
    tasks = np.repeat([0, 1, 2], [40, 6, 2])
    shares = passes.Shares(tasks, np.array([1, 2, 1], np.float32))
    walk, drawn = passes.start(shares, 8, SEED), []
    for _ in range(30):
        ids = walk.ids.tolist()
        assert np.bincount(tasks[ids]).tolist() == [2, 4, 2] and len(set(ids)) == 8
        drawn += ids
        walk = passes.advance(walk, asked(walk.ids, 48)["tried"], jnp.ones(48, bool))
    times = np.bincount(drawn)
    assert sorted(times[:40]) == [1] * 20 + [2] * 20 and times[40:].tolist() == [20] * 6 + [30] * 2
    keys = jax.random.split(jax.random.key(0), 4000)
    few = jax.vmap(lambda key: passes.least_visited(key, jnp.zeros(48, jnp.int32), jnp.ones(48, bool), shares, 3))(keys)
    close(np.bincount(tasks[np.asarray(few).ravel()]) / few.size, [0.25, 0.5, 0.25], atol=0.01)
    left = passes.least_visited(keys[0], jnp.zeros(48, jnp.int32), jnp.asarray(tasks != 1), shares, 8)
    assert np.bincount(tasks[np.asarray(left)], minlength=3).tolist() == [6, 0, 2]


# --- VADE


def test_vade():
    close(vade.gain(jnp.array([0.5, 1 / 3, 0.8])), [0.125, 0.148148, 0.032], atol=5e-7)
    won, lost = vade.decayed(jnp.array([0, 3, 7.0]), jnp.array([0, 5, 1.0]), jnp.array([8, 8, 0]), jnp.array([4, 2, 0]),
                             local=0.9, broad=0.99)
    close(won, [4, 4.7, 6.93], rtol=1e-6)
    close(lost, [4, 10.5, 0.99], rtol=1e-6)
    close((won + 1) / (won + lost + 2), [0.5, 0.331395, 0.799395], atol=5e-7)


def test_vade_chooses_each_tasks_share():
    shares = passes.Shares(np.repeat([0, 1], [20, 4]), np.array([1, 1], np.float32))
    state = control.make("vade").init(shares=shares, batch=6, seed=SEED)
    assert np.bincount(shares.tasks[np.asarray(state.ids)]).tolist() == [3, 3]


@pytest.mark.slow
def test_vade_prefers_uncertain_problems_and_starves_none():
    """Of 20 problems that are solved, failed or mixed, the mixed ones come most often; counts decay, so all return."""
    rates = np.repeat([0.0, 0.35, 1.0], [8, 4, 8])
    one = control.make("vade", broad=0.9)
    state, drawn, late = one.init(shares=alone(20), batch=4, seed=SEED), np.zeros(20), np.zeros(20)
    observe = jax.jit(one.observe)
    for step in range(150):
        ids = np.asarray(one.propose(state)["prompt_ids"])
        assert len(set(ids.tolist())) == 4 and ids.min() >= 0
        drawn[ids] += 1
        late[ids] += step >= 75
        state = observe(state, asked(ids, 20, rates=rates))
    assert drawn[8:12].mean() > 2 * np.delete(drawn, range(8, 12)).mean() and late.min() > 0
    with pytest.raises(ValueError, match="local=0, broad=0.99; decays are above 0"):
        control.make("vade", local=0)


# --- Kimi


def test_kimi():
    close(kimi_sampling.by_failure(jnp.array([0.2, 0.5, 0.9])), [0.571429, 0.357143, 0.071429], atol=5e-7)
    close(kimi_sampling.by_failure(jnp.ones(4)), [0.25] * 4)
    right = jnp.array([[True, True, False, False]])
    lengths = jnp.array([[100, 200, 100, 300]])
    reward = length_reward(lengths, right, jnp.ones((1, 4), bool))
    close(reward, [[0.5, 0, 0, -0.5]])
    close(right + reward, [[1.5, 1, 0, -0.5]])
    assert not length_reward(jnp.full((1, 3), 7), right[:, :3], jnp.ones((1, 3), bool)).any()
    assert not length_reward(lengths, right, jnp.zeros((1, 4), bool)).any()


def test_kimi_goes_from_easy_to_hard_and_then_by_failure():
    one = control.make("kimi_sampling", every=2)
    state = one.init(levels=np.array([1, 0, 1, 2]))
    seen = []
    for step in range(7):
        weights = one.propose(state)["prompt_weights"]
        seen.append(weights.tolist())
        state = one.observe(state, facts([0, 10, 10, 0], [0, 5, 10, 0]))
    assert seen[:6] == [[0, 1, 0, 0]] * 2 + [[1, 0, 1, 0]] * 2 + [[0, 0, 0, 1]] * 2
    close(seen[6], [0.4, 0.2, 0, 0.4], rtol=1e-6)  # an untried problem counts as failed
    at_once = control.make("kimi_sampling", every=0)
    close(at_once.propose(at_once.init(levels=np.array([0, 1])))["prompt_weights"], [0.5, 0.5])


# --- AceReason


def test_acereason():
    right = jnp.array([0, 3, 6, 7, 16])
    assert staged_problems.within(jnp.full(5, 16), right, 0, 6 / 16).tolist() == [True, True, True, False, False]
    one = control.make("staged_problems")
    state, seen = one.init(prompts=5), []
    for phase in range(5):
        state = one.begin(state) if phase else state
        for _ in range(2):
            seen.append(one.propose(state)["prompt_weights"].tolist())
            state = one.observe(state, facts([16, 16, 16, 16, 0], [0, 3, 6 if phase < 2 else 16, 7, 0]))
    everyone, some, fewer = [1] * 5, [1, 1, 1, 0, 1], [1, 1, 0, 0, 1]  # the last was never tried
    assert seen == [everyone] * 4 + [some] * 2 + [fewer] * 4
    config = default_config()
    config.method = "acereason_curriculum"
    stages = [(one.config.sampling.max_tokens, one.config.sampling.group, one.patience) for one in phases_of(config)]
    assert stages == [(8, 4, 3), (16, 8, 3), (24, 8, 3), (32, 8, 3)]


def test_table_gpt():
    """Of 8 rollouts 1, 3, 7 and 8 are right: the second stage keeps the middle two; the third those below one half of them."""
    (name, numbers), = methods.get("table_gpt_r1").parts("controllers")
    one = control.make(name, **numbers)
    state = one.begin(one.observe(one.init(prompts=4), facts([8] * 4, [1, 3, 7, 8])))
    assert one.propose(state)["prompt_weights"].tolist() == [0, 1, 1, 0]
    state = one.begin(one.observe(state, facts([8] * 4, [0, 3, 4, 0])))
    assert one.propose(state)["prompt_weights"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("bands", ((), ((0, 1), (0.5, 0.25)), ((0, 1.5),), ((0.5,),)))
def test_bands_are_shares_in_order(bands):
    with pytest.raises(ValueError, match="give the lowest and the highest share of right rollouts for each phase"):
        control.make("staged_problems", bands=bands)


# --- RAPO


def test_rapo_drops_problems_solved_in_a_pass():
    rates = np.array([0.875, 1.0, 0.0, 0.5, 1.0])
    one = control.make("rapo_curriculum")
    state, seen = one.init(shares=alone(5), batch=2, seed=SEED), []
    for _ in range(8):
        ids = one.propose(state)["prompt_ids"]
        seen.append(ids.tolist())
        state = one.observe(state, asked(ids, 5, rates=rates))
    assert one.propose(state)["prompt_weights"].tolist() == [1, 0, 1, 1, 0]
    drawn = sum(seen, [])
    assert sorted(drawn[:5]) == [0, 1, 2, 3, 4] and drawn.count(1) == drawn.count(4) == 1 and {0, 2, 3} == set(drawn[6:])


# --- SIRI


TIMES = (0, 80, 120, 160, 200, 240, 320, 400, 480, 560, 600, 640)
LIMITS = {
    "stair": [8192] * 6 + [16384] * 5 + [8192],
    "cosine": [16384, 15184.31, 13855.47, 12288, 10720.53, 9391.69, 8192, 9391.69, 12288, 15184.31, 16072.21, 16384],
    "stair_cosine": [16384, 16384, 15184.31, 12288, 9391.69, 8192, 8192, 8192, 12288, 16384, 16384, 16384],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", siri.SHAPES)
def test_siri(shape):
    close(siri.length_limit(jnp.array(TIMES), 8192, 16384, period=640, shape=shape), LIMITS[shape], atol=6e-3)
    one = control.make("siri", shape=shape)
    state = one.init(max_tokens=16384)
    for step in range(640):
        state = one.observe(state, facts([0], step=step))
        result = one.propose(state)["max_tokens"]
        assert 8192 <= result <= 16384 and result.dtype == jnp.int32
        if step + 1 in TIMES:
            assert int(result) == round(LIMITS[shape][TIMES.index(step + 1)])


# --- QwenLong-L1


LENGTHS = np.array([3000, 20000, 20001, 59000, 61000, 8000])


@pytest.mark.parametrize("mode, second", [("zero_only", [1, 0, 1, 1, 0, 0]), ("weighted", [1, 0.25, 1, 1, 0, 1])])
def test_qwenlong_phases(mode, second):
    assert qwenlong_l1.phase_of(jnp.asarray(LENGTHS), (20_000, 60_000)).tolist() == [1, 1, 2, 2, 0, 1]
    one = control.make("qwenlong_l1", mode=mode)
    state = one.init(prompt_lengths=LENGTHS)
    assert one.propose(state)["prompt_weights"].tolist() == [1, 1, 0, 0, 0, 1]
    state = one.observe(state, facts([8, 8, 0, 0, 0, 8], [0, 4, 0, 0, 0, 1]))
    state = one.observe(state, facts([8, 8, 0, 0, 0, 8], [8, 8, 0, 0, 0, 8]))  # later successes are not the base model's
    state = one.begin(state)
    close(one.propose(state)["prompt_weights"], second)
    jax.tree.map(np.testing.assert_array_equal, one.begin(state), state)  # there is no third phase


def test_qwenlong_phases_by_shares_of_the_prompts():
    """The shorter half of the prompts that can be asked and then the others; a phase without a prompt is refused."""
    lengths = np.array([9, 7, 0, 7, 9, 12, 7])
    assert qwenlong_l1.limits_of(lengths, (0.5, 1.0)) == (7, 12) and qwenlong_l1.limits_of(lengths, (8, 1.0)) == (8, 12)
    state = control.make("qwenlong_l1", limits=(0.5, 1.0)).init(prompt_lengths=lengths)
    assert state.phase.tolist() == [2, 1, 1, 1, 2, 2, 1]
    for limits, message in (((20_000, 60_000), "more than 0 and at most 20000"), ((0.9, 1.0), "more than 12 and at most 12"),
                            ((7, 8), "7 and at most 8 tokens, so a phase of qwenlong_l1 has no problem; prompts have 7 to 12")):
        given = lengths if limits != (20_000, 60_000) else 20_001 + lengths
        with pytest.raises(ValueError, match=message):
            control.make("qwenlong_l1", limits=limits).init(prompt_lengths=given)


def test_qwenlong_difficulty():
    """Weights 8 and 2 of unsolved and half-solved problems of phase 1, and 8 of one solved once in 8."""
    weights = qwenlong_l1.difficulty(jnp.array([0, 0.5, 0.125]), 8)
    assert weights.tolist() == [8, 2, 8]
    close(weights / weights.sum(), [0.444444, 0.111111, 0.444444], atol=5e-7)
    with pytest.raises(ValueError, match="limits that grow"):
        control.make("qwenlong_l1", limits=(60_000, 20_000))


# --- SwS


def trends():
    accuracy = np.array([[0.375, 0.25, 0.125], [0.25, 0.25, 0.375], [0.5, 0.25, 0.125], [0.25, 0.125, 0]])
    state = control.make("sws_domains").init(levels=np.array([0, 0, 1, 1]))
    for visit in accuracy.T:
        state = sws.visited(state, jnp.full(4, 8), jnp.asarray(8 * visit))
    return state, accuracy


def test_sws_weaknesses():
    state, accuracy = trends()
    close(sws.slope(state), [-0.125, 0.0625, -0.1875, -0.125], atol=1e-6)
    close(sws.slope(state), [np.polyfit(range(3), row, 1)[0] for row in accuracy], atol=1e-6)
    assert sws.weak(state).tolist() == [True, False, False, True]
    flat = control.make("sws_domains").init(levels=np.zeros(1, int))
    for _ in range(4):
        flat = sws.visited(flat, jnp.array([3]), jnp.array([1]))
    assert not sws.weak(flat).any() and not sws.weak(sws.visited(
        control.make("sws_domains").init(levels=np.zeros(1, int)), jnp.array([3]), jnp.array([0]))).any()  # seen once


def test_slopes_are_those_of_least_squares():
    rng = np.random.default_rng(0)
    accuracy = rng.integers(0, 9, (6, 30)) / 8
    state = control.make("sws_domains").init(levels=np.zeros(6, int))
    for visit in accuracy.T:
        state = sws.visited(state, jnp.full(6, 8), jnp.asarray(8 * visit))
    close(sws.slope(state), [np.polyfit(range(30), row, 1)[0] for row in accuracy], atol=1e-6)


def test_sws_draws_domains_by_their_weak_problems():
    state, _ = trends()
    weights = sws_domains.domain_weights(state._replace(domain=jnp.array([0, 1, 1, 1])))
    close(weights, [1, 1 / 9, 1 / 9, 1 / 9], rtol=1e-6)  # shares 1 and 1/3 of the domains, spread over 1 and 3 problems
    one = control.make("sws_domains")
    assert one.propose(state)["prompt_weights"].tolist() == [1] * 4
    after = one.observe(one.begin(state), facts([8] * 4, [8] * 4))
    close(one.propose(after)["prompt_weights"], [0.25] * 4)  # a weak problem of two in each of two domains
    assert sws.weak(after).tolist() == sws.weak(state).tolist()  # the choice stays


# --- DRIVE


def test_drive():
    kept = jnp.ones(6, bool)
    phases = [([0, 0.9, 0.2, 0.5, 0.1, 0], 4, [0, 2, 4, 5]), ([0.3, 0.9, 0.2, 0.5, 0.1, 0], 3, [2, 4, 5]),
              ([0.3, 0.9, 0.6, 0.5, 0.1, 0.2], 2, [4, 5])]
    for rates, count, expected in phases:
        kept = drive.hardest(jnp.array(rates), kept, count)
        assert np.flatnonzero(kept).tolist() == expected
    assert drive.hardest(jnp.zeros(4), jnp.array([False, True, True, True]), 2).tolist() == [False, True, True, False]


def test_drive_in_steps():
    one = control.make("drive", keep=(4 / 6, 3 / 6, 2 / 6), steps=(3, 4, 2, 2))
    state, seen = one.init(shares=alone(6), batch=2, seed=SEED, group=8, max_group=64, max_tokens=32), []
    rates = np.array([0.125, 0.9, 0.25, 0.5, 0.125, 0])
    for step in range(14):
        result = one.propose(state)
        weights = np.flatnonzero(result["prompt_weights"]).tolist()
        assert set(result["prompt_ids"].tolist()) <= set(weights)
        seen.append((weights, result["group_sizes"].tolist(), int(result["max_tokens"])))
        assert not result["measured_times"].any()
        state = one.observe(state, asked(result["prompt_ids"], 6, rates=rates))
        times = np.asarray(one.propose(state)["measured_times"])
        if times.any():  # those that remain are asked before a phase
            assert step in (2, 6, 8) and np.flatnonzero(times).tolist() == weights and times.max() == 8
            state = one.observe(state, {"measured_tried": times, "measured_right": (rates * times).astype(np.int32)})
    assert seen[:3] == [([0, 1, 2, 3, 4, 5], [8, 8], 24)] * 3
    assert seen[3:7] == [([0, 2, 4, 5], [64, 64], 32)] * 4
    assert seen[7:] == [([0, 4, 5], [64, 64], 32)] * 2 + [([0, 5], [64, 64], 32)] * 5
    with pytest.raises(ValueError, match="one number of steps for the first stage"):
        control.make("drive", keep=(0.5,), steps=(3,))


# --- a measure of all problems before the first step


def test_problems_that_the_first_policy_never_solves_are_left_out():
    one = control.make("solvable")
    state = one.init(prompts=4)
    result = one.propose(state)
    assert result["measured_times"].tolist() == [16] * 4 and result["prompt_weights"].tolist() == [1] * 4
    told = one.observe(state, {"measured_tried": jnp.array([16, 16, 0, 16]), "measured_right": jnp.array([0, 1, 0, 16])})
    assert one.propose(told)["prompt_weights"].tolist() == [0, 1, 0, 1] and not one.propose(told)["measured_times"].any()
    none = one.observe(state, {"measured_tried": jnp.full(4, 16), "measured_right": jnp.zeros(4, int)})
    assert one.propose(none)["prompt_weights"].tolist() == [1] * 4  # a task that nobody can do
    with pytest.raises(ValueError, match="times=0"):
        control.make("solvable", times=0)


def test_the_first_phase_has_shares_by_difficulty_and_later_ones_bands():
    """Of five answers 1, 2, 4, 3 are right: hard, medium, easy, medium; a fifth problem is unknown."""
    one = control.make("stratified")
    state = one.init(prompts=5)
    assert one.propose(state)["measured_times"].tolist() == [5] * 5 and one.propose(state)["prompt_weights"].tolist() == [1] * 5
    told = one.observe(state, {"measured_tried": jnp.array([5, 5, 5, 5, 0]), "measured_right": jnp.array([1, 2, 4, 3, 0])})
    np.testing.assert_allclose(one.propose(told)["prompt_weights"], [1, 1.5, 1, 1.5, 0], rtol=1e-6)  # 5 x 0.2, 5 x 0.6 / 2
    assert not one.propose(told)["measured_times"].any()
    only = one.observe(state, {"measured_tried": jnp.full(5, 5), "measured_right": jnp.array([0, 0, 0, 0, 5])})
    np.testing.assert_allclose(one.propose(only)["prompt_weights"], [0.625] * 4 + [2.5], rtol=1e-6)  # no medium ones: halves
    tried = one.observe(told, {"tried": jnp.full(5, 8), "right": jnp.array([1, 3, 7, 8, 4])})
    second = one.begin(tried)
    assert one.propose(second)["prompt_weights"].tolist() == [0, 1, 1, 0, 1]  # 3 to 7 of 8, as in the worked example
    third = one.begin(one.observe(second, {"tried": jnp.full(5, 8), "right": jnp.array([0, 3, 4, 0, 8])}))
    assert one.propose(third)["prompt_weights"].tolist() == [0, 1, 0, 0, 0]
    for wrong in ({"times": 0}, {"shares": (1, 1)}, {"shares": (0, 0, 0)}, {"low": 0.8}):
        with pytest.raises(ValueError, match="the shares of hard, medium and easy problems"):
            control.make("stratified", **wrong)


def test_pass_rates_are_drawn_evenly_within_their_task():
    """Rates 0, 1/8, 1/8, 1/2, 1 of one task fill three of four bins; two problems of another fill one; one is unknown."""
    one = control.make("even_rates", times=8)
    state = one.init(shares=passes.Shares(np.array([0] * 5 + [1] * 3), np.array([1.0, 1.0])))
    assert one.propose(state)["measured_times"].tolist() == [8] * 8
    told = one.observe(state, {"measured_tried": jnp.array([8] * 7 + [0]),
                               "measured_right": jnp.array([0, 1, 1, 4, 8, 5, 5, 0])})
    result = one.propose(told)
    np.testing.assert_allclose(result["prompt_weights"], [5 / 9] * 3 + [5 / 3] * 2 + [1.5, 1.5, 0], rtol=1e-6)
    assert not result["measured_times"].any()
    lost = one.observe(state, {"measured_tried": jnp.zeros(8, int), "measured_right": jnp.zeros(8, int)})
    assert one.propose(lost)["prompt_weights"].tolist() == [1] * 8
    with pytest.raises(ValueError, match="bins=0"):
        control.make("even_rates", bins=0)


# --- equally many of each task


def test_every_task_has_its_share():
    """Levels with 7, 3 and 2 problems: every batch of six has two of each level, and each level has its own passes."""
    levels = np.array([0] * 7 + [1] * 3 + [2] * 2)
    one = control.make("task_balance")
    state, drawn = one.init(levels=levels, batch=6, seed=SEED), []
    for _ in range(21):
        ids = np.asarray(one.propose(state)["prompt_ids"])
        assert np.bincount(levels[ids]).tolist() == [2, 2, 2] and len(set(ids.tolist())) == 6
        drawn += ids.tolist()
        state = one.observe(state, asked(ids, 12))
    assert np.bincount(drawn).tolist() == [6] * 7 + [14] * 3 + [21] * 2
    state, counts = one.init(levels=levels, batch=4, seed=SEED), np.zeros(3)
    for _ in range(6):
        ids = np.asarray(one.propose(state)["prompt_ids"])
        counts += np.bincount(levels[ids], minlength=3)
        state = one.observe(state, asked(ids, 12))
    assert counts.tolist() == [8, 8, 8]  # the remainder rotates


# --- all of them


KNOWN = {"prompts": 12, "shares": passes.Shares(np.repeat([0, 1], [8, 4]), np.array([1.0, 2.0], np.float32)), "batch": 3,
         "group": 2, "max_group": 8, "max_tokens": 32, "prompt_lengths": np.arange(12) * 5000, "levels": np.arange(12) % 3,
         "seed": SEED, "embeddings": np.random.default_rng(0).normal(size=(12, 5))}
CURRICULA = {"vade": {}, "kimi_sampling": {"every": 1}, "staged_problems": {}, "stratified": {}, "rapo_curriculum": {},
             "qwenlong_l1": {}, "sws_domains": {}, "siri": {"period": 4},
             "drive": {"steps": (2, 1, 1, 1)}, "task_balance": {}, "dart_curation": {}, "gdro_rollout": {},
             "dots_rr": {"reference": 4, "width": 8}}


def played(one, state, first, last):
    """The proposals and the state of steps `first` to `last`, with the outcomes of a policy that solves some problems."""
    result = []
    for step in range(first, last):
        proposed = one.propose(state)
        result.append(jax.tree.map(np.asarray, proposed))
        rng = np.random.default_rng(step)
        ids = proposed.get("prompt_ids")
        tried = np.zeros(12, np.int32)
        tried[rng.permutation(12)[:3] if ids is None else np.asarray(ids)[np.asarray(ids) >= 0]] = 4
        right = np.minimum(rng.integers(0, 5, 12), tried)
        rates = np.where(proposed.get("reference_ids", np.zeros(4)) >= 0, rng.random(4), np.nan).astype(np.float32)
        state = one.observe(state, {"step": np.int32(step), "tried": tried, "right": right.astype(np.int32),
                                    "reference_rates": rates})
        times = np.asarray(one.propose(state).get("measured_times", np.zeros(12, np.int32)))
        if times.any():
            state = one.observe(state, {"measured_tried": times, "measured_right": rng.binomial(times, 0.5).astype(np.int32)})
    return result, state


@pytest.mark.slow
@pytest.mark.parametrize("slug", CURRICULA)
def test_a_restored_state_continues_exactly(slug):
    """Six steps in a row, and three plus three with a copy of the state through the host, propose the same to the last bit."""
    import inspect
    one = control.make(slug, **CURRICULA[slug])
    start = one.init(**{name: KNOWN[name] for name in inspect.signature(one.init).parameters})
    whole, end = played(one, start, 0, 6)
    _, half = played(one, start, 0, 3)
    rest, again = played(one, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half), 3, 6)
    jax.tree.map(np.testing.assert_array_equal, whole[3:], rest)
    jax.tree.map(np.testing.assert_array_equal, end, again)
    for proposed in whole:
        weights, ids = proposed.get("prompt_weights", np.ones(12)), proposed.get("prompt_ids", np.zeros(3))
        assert np.isfinite(weights).all() and (weights >= 0).all() and weights.shape == (12,)
        assert ids.shape == (3,) and ids.max() < 12 and len({*ids[ids >= 0].tolist()}) == (ids >= 0).sum() or not ids.any()
        assert 1 <= proposed.get("max_tokens", 1) <= 32
        assert proposed.get("group_sizes", np.full(3, 2)).min() >= 1 and proposed.get("group_sizes", np.zeros(3)).max() <= 8
