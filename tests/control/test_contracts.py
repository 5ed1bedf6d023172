"""Filters and controllers by name: their guarantees, on one batch of rollouts."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_task import alone

from jaxrl_llm import control
from jaxrl_llm.data.rollouts import check, from_lists

# Four prompts by (accuracy, total reward): mixed, all right with a varying bonus, all wrong, mixed but of equal totals.
ACCURACY = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]], np.float32)
ROLLOUTS = from_lists([[1.2, 0.1, 1.0], [1.2, 1.0, 1.1], [0.2, 0.2, 0.0], [0.6, 0.6, 0.6]],
                      [[3, 1, 2], [2, 4, 2], [1, 2, 3], [2, 2, 2]]).replace(
    reward_components=jnp.asarray(ACCURACY)[..., None], prompt_ids=jnp.array([4, 0, 2, 1]),
    extras={"correct": jnp.asarray(ACCURACY) > 0.5, "truncated": jnp.zeros((4, 3), bool).at[0, 0].set(True),
            "turns": jnp.ones((4, 3), jnp.int32), "step_rewards": jnp.asarray(ACCURACY), "match": jnp.ones((4, 3), bool),
            "traj": jnp.tile(jnp.arange(3), (4, 1)), "step": jnp.zeros((4, 3), jnp.int32),
            "perf": jnp.asarray(ACCURACY), "void": jnp.zeros((4, 3, 4), bool).at[1, 2, 0].set(True),
            "answers": jnp.zeros((4, 3), jnp.int32).at[3, 1].set(-1),
            "unreadable": jnp.zeros((4, 3), bool).at[2, 0].set(True)}, tokens=jnp.zeros((4, 3, 4), jnp.int32))
KEPT = {
    "dynamic_sampling": [True, False, False, True],
    "lightningrl": [True, True, False, False],  # the last has a right answer, but all of one length
    "mars2_path_adv": [True, False, False, True],
    "spear_clip": [True, True, True, False],
    "spear_rollouts": [[False, True, True], [True, True, False], [False, True, True], [True, False, True]],
    "moved_or_mixed": [[True] * 3, [False] * 3, [False] * 3, [True] * 3],
    "rewarded": [[True] * 3, [True] * 3, [True, True, False], [True] * 3],
    "right_ones": [[False, False, True], [True, False, False], [False] * 3, [True, False, False]],
    "simpletir": [True, False, False, True],
    "ui_s1": [True, False, False, True],
    "sws": [True, False, False, True],
    "simpletir_filter": [[True] * 3, [True, True, False], [True] * 3, [True] * 3],
}


def test_every_filter_is_tested_here():
    assert control.filter_names() == sorted(KEPT)


@pytest.mark.parametrize("slug", KEPT)
def test_filters(slug):
    one = control.make_filter(slug)
    check(ROLLOUTS, *one.needs)
    kept = jax.jit(one.keep)(ROLLOUTS)
    assert kept.tolist() == KEPT[slug] and kept.dtype == bool
    assert kept.ndim == {"prompt": 1, "rollout": 2}[one.per]


def test_interaction_grows_in_stages():
    one = control.make("scaling_inter_rl")
    at = {step: int(one.propose(jnp.int32(step - 1))["max_turns"]) for step in (1, 100, 101, 200, 201, 999)}
    assert at == {1: 10, 100: 10, 101: 20, 200: 20, 201: 30, 999: 30}
    with pytest.raises(ValueError, match="positive numbers that grow"):
        control.make("scaling_inter_rl", turns=(10, 5))


def test_the_horizon_of_tti_grows_with_the_iteration():
    def at(step, **hyper):
        one = control.make("tti", **hyper)
        return int(one.propose(jnp.int32(step - 1))["max_turns"])
    assert [at(i) for i in (1, 2, 3, 4)] == [10, 20, 30, 30]
    assert [at(i, growth="additive") for i in (1, 2, 3, 4, 19, 20, 21)] == [11, 12, 13, 14, 29, 30, 30]
    assert [at(i, every=2) for i in (1, 2, 3)] == [10, 10, 20]
    for wrong in ({"growth": "linear"}, {"least": 0}, {"least": 9, "most": 8}, {"every": 0}):
        with pytest.raises(ValueError, match="Allowed|give 1 <= least"):
            control.make("tti", **wrong)


def test_turns_are_limited_by_what_an_unrestricted_agent_uses():
    needed, group = np.array([8, 25, 33, 45, 70]), jnp.ones((1, 5), bool)
    one = control.make("turn_control", first=75, steps=1)
    state = one.init()
    assert one.propose(state) == {"max_turns": 100, "announced_turns": 0}
    rollouts = from_lists([[0.0] * 5]).replace(extras={"turns": jnp.array([[10, 20, 30, 40, 50]])})
    state = one.observe(state, {"rollouts": rollouts})
    assert {name: int(x) for name, x in one.propose(state).items()} == {"max_turns": 40, "announced_turns": 40}
    used = np.minimum(needed, 40)
    assert used.tolist() == [8, 25, 33, 40, 40] and (used * (used + 1) // 2).sum() == 2562
    assert (needed * (needed + 1) // 2).sum() == 4442
    later = one.observe(state, {"rollouts": rollouts.replace(extras={"turns": jnp.full((1, 5), 99)})})
    np.testing.assert_array_equal(later.turns, state.turns)  # limited turns do not change the limit
    growing = control.make("turn_control", steps=1)
    assert {name: int(x) for name, x in growing.propose(state).items()} == {"max_turns": 40, "announced_turns": 30}
    part = one.observe(one.init(), {"rollouts": rollouts.replace(valid=group.at[0, 2:].set(False))})
    assert int(part.count) == 2 and int(one.propose(part)["max_turns"]) == 18  # 17.5, to the even one
    small = control.make("turn_control", steps=1, size=3)
    assert np.asarray(small.observe(small.init(), {"rollouts": rollouts}).turns).tolist() == [10, 20, 30]
    nobody = one.observe(one.init(), {"rollouts": rollouts.replace(valid=~group)})
    assert int(one.propose(nobody)["max_turns"]) == 100
    for wrong in ({"first": 80}, {"last": 101}, {"first": 0}, {"steps": 0}, {"size": 0}):
        with pytest.raises(ValueError, match="give percentiles"):
            control.make("turn_control", **wrong)


def test_an_answer_that_was_cut_off_is_wrong_for_lightningrl():
    cut = ROLLOUTS.replace(extras=dict(ROLLOUTS.extras) | {"truncated": jnp.ones((4, 3), bool)})
    assert not control.make_filter("lightningrl").keep(cut).any()
    assert control.make_filter("lightningrl", perf="perf").keep(ROLLOUTS).tolist() == [True, False, False, True]


def test_without_components_filters_look_at_the_rewards():
    plain = ROLLOUTS.replace(reward_components=None)
    assert control.make_filter("dynamic_sampling").keep(plain).tolist() == [True, True, True, False]


SEED = jax.random.key_data(jax.random.key(1))
STARTS = {"staged_problems": (5,), "brorl": (8,), "dart_curation": (alone(5), 2, SEED, 8), "dart_lengths": (5, 32),
          "drive": (alone(5), 2, SEED, 2, 8, 32), "solvable": (5,), "stratified": (5,), "even_rates": (alone(5),),
          "dots_rr": (np.eye(5, 3), SEED), "props": (),
          "gdro_rollout": (alone(5), 2, SEED, 2, 8), "kimi_sampling": (np.arange(5),),
          "qwenlong_l1": (20_000 * np.arange(5),),
          "rapo_curriculum": (alone(5), 2, SEED), "remix": ({"w": jnp.zeros(2)},), "siri": (32,),
          "sws_domains": (np.arange(5) % 2,), "task_balance": (np.arange(5) % 2, 3, SEED), "vade": (alone(5), 2, SEED),
          "acereason_temperature": (1.0,), "historical_variance": (5,), "pass_rate": (5,), "reference_reset": (),
          "scaling_inter_rl": (), "fresh_optimizer": (),
          "recent_median": (), "moving_reference": ({"w": jnp.zeros(2)},), "tool_bonus": (), "tti": (), "turn_control": ()}
FACTS = {"score": 0.3, "step": jnp.int32(0), "tried": jnp.array([4, 0, 4, 8, 0]), "right": jnp.array([4, 0, 1, 2, 0]),
         "params": {"w": jnp.ones(2)}, "measured_tried": jnp.array([4, 4, 4, 4, 0]),
         "measured_right": jnp.array([4, 0, 1, 2, 0]), "reference_rates": jnp.array([0.5, 0, 1, jnp.nan, 0.25]),
         "rollouts": ROLLOUTS.replace(tokens=jnp.ones((4, 3, 4), jnp.int32), behavior_logprobs=jnp.zeros((4, 3, 4)),
                                    entropies=jnp.ones((4, 3, 4)))}


def test_every_controller_is_tested_here():
    assert control.names() == sorted(STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("slug", STARTS)
def test_controllers_are_pure_functions_of_pytrees_of_one_shape(slug):
    controller = control.make(slug)
    state = controller.init(*STARTS[slug])
    facts = {name: FACTS[name] for name in controller.facts}  # reads no others
    after = jax.jit(controller.observe)(state, facts)
    def shapes(tree):
        return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    assert shapes(after) == shapes(state)
    jax.tree.map(np.testing.assert_array_equal, state, controller.init(*STARTS[slug]))
    assert tuple(controller.propose(after)) == controller.knobs


def test_pass_rate_over_the_whole_history():
    controller = control.make("pass_rate")
    state = controller.init(5)
    assert controller.propose(state)["prompt_weights"].all()
    state = controller.observe(state, {"tried": jnp.array([3, 3, 3, 0, 3]), "right": jnp.array([3, 1, 0, 0, 2])})
    assert state.tried.tolist() == [3, 3, 3, 0, 3] and state.solved.tolist() == [3, 1, 0, 0, 2]
    assert controller.propose(state)["prompt_weights"].tolist() == [0, 1, 1, 1, 1]
    state = controller.observe(state, {"tried": jnp.array([3, 0, 0, 0, 0]), "right": jnp.array([1, 0, 0, 0, 0])})
    assert state.tried.tolist() == [6, 3, 3, 0, 3] and state.solved.tolist() == [4, 1, 0, 0, 2]
    assert controller.propose(state)["prompt_weights"].all()


def test_replayed_rollouts_are_not_counted():
    """A replayed success does not count in the mean of its group."""
    replayed = ROLLOUTS.replace(extras=dict(ROLLOUTS.extras) | {"replayed": ROLLOUTS.valid.at[:, 1:].set(False)})
    yardstick = control.make("recent_median", size=8)
    history = yardstick.observe(yardstick.init(), {"rollouts": replayed})
    means = np.nanmean(np.where(replayed.fresh, ROLLOUTS.rewards, np.nan), axis=1)
    np.testing.assert_allclose(np.asarray(history.values)[:len(means)], means, rtol=1e-6)


def test_names_and_keywords_are_checked():
    with pytest.raises(ValueError, match="controller 'reference_rset'. Did you mean 'reference_reset'"):
        control.make("reference_rset")
    with pytest.raises(ValueError, match="filter 'dynamic_samplin'. Did you mean 'dynamic_sampling'"):
        control.make_filter("dynamic_samplin")
    with pytest.raises(ValueError, match="keyword of controller 'reference_reset' 'patients'. Did you mean 'patience'"):
        control.make("reference_reset", patients=2)
