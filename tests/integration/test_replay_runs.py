"""Methods that replay, by name: the contents of their batches, the recorded fields, and resumes from a checkpoint."""
import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
import run_files
import tiny_config
from run_files import assert_same, lines, repeatable

from jaxrl_llm import methods
from jaxrl_llm.learning import schedules
from jaxrl_llm.learning.learner import stamped
from jaxrl_llm.replay import Replay, priorities
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.replay.base import RULES
from jaxrl_llm.rewards import Scores
from jaxrl_llm.runs import loop
from jaxrl_llm.sampling.position import jsonable
from jaxrl_llm.setup import parts, setup
from jaxrl_llm.tools.registry import Kind

P, G = 4, 4
REPLAY = {"remix": "reuse=1.0"}
# Methods that do not choose problems:
NAMES = ["arpo_replay", "rapo", "remix"]  # stored rollouts enter batches
# Stored rollouts are learned from in updates of their own:
APART = {"r2vpo_replay": "", "sil": "updates=2", "spear": "fill=0.2", "spear_clip": "fill=0.2"}


def tiny(method, **changes):
    config = tiny_config.get_config()
    config.method, config.replay, config.model.num_layers = method, (REPLAY | APART).get(method, ""), 1
    config.update_from_flattened_dict(changes)
    return config


def with_factor(run, factor):
    """The run with rewards times `factor[0]`, which may change during the run."""
    reward = run.source.stream.partner.reward

    def scaled(*rest):
        result = reward(*rest)
        return Scores(result.total * factor[0], result.components * factor[0], result.names, result.failures)

    partner = run.source.stream.partner.scoring(run_files.called(reward, scaled))
    return dataclasses.replace(run, source=dataclasses.replace(run.source, stream=run.source.stream.apart(partner=partner)))


def by_uid(forest, rollouts):
    """Log-probs and tokens of each trajectory of a batch."""
    owner = forest.prompt[forest.ends]
    place = np.arange(len(owner)) - np.searchsorted(owner, owner)
    return {uid: (rollouts.behavior_logprobs[p, g][rollouts.mask[p, g]], rollouts.tokens[p, g][rollouts.mask[p, g]],
                  rollouts.prompt_tokens[p][rollouts.prompt_mask[p]]) for uid, p, g in
            zip(forest.uid[forest.ends].tolist(), owner, place)}


def test_they_run_by_name_and_others_have_no_buffer():
    replaying = {row.slug for row in methods.METHODS.values() if row.replay}
    others = {"rapo_curriculum", "rapo_steps", "dots_rr", "dart_tis", "dart_curation", "props", "archer", "bepa"}
    assert {*NAMES, *APART, *others} == replaying
    assert replaying - {"rapo_steps", "archer"} <= set(methods.runnable()), "these read what an environment counts"
    run, _ = setup.build(tiny("grpo"))
    assert "buffer" not in run.source.position()
    with pytest.raises(ValueError, match="config.replay='reuse=1.0': .* method 'grpo' has no replay rule here"):
        setup.build(tiny("grpo", replay="reuse=1.0"))
    with pytest.raises(ValueError, match="method 'remix' has a replay, whose rollouts have no reward predictions"):
        setup.build(tiny("remix", **{"budget.utility": "paper"}))
    with pytest.raises(ValueError, match="method 'spear' weighs tokens by learner over sampler probability"):
        setup.build(tiny("spear", **{"sampling.top_k": 3}))


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_three_steps_by_name(method):
    """The same problems three times; from the second step on no answer is right, so there is much to replay."""
    factor = [1.0]
    run, params = setup.build(tiny(method))
    run = with_factor(run, factor)
    start, state = run.source.data.get_state(), setup.initial_state(run, params)
    steps = schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params))
    seen: dict = {}
    before = jax.device_get(state.params)
    for number in range(3):
        run.source.set_position(run.source.position() | {"data": start})
        fresh_from = run.source.next_uid
        done = next(steps)
        finished, learned, rollouts = done.finished, done.learned, stamped(done.finished.rollouts, number)
        metrics = finished.metrics | learned.metrics
        replayed, age = rollouts.extras["replayed"], rollouts.extras["age"]
        result, uids = by_uid(finished.forest, rollouts), finished.forest.uid[finished.forest.ends]
        assert rollouts.valid.shape == (P, G) and replayed[rollouts.valid].sum() == (uids < fresh_from).sum()
        for uid in uids[uids < fresh_from].tolist():  # as it was sampled
            for was, now in zip(seen[uid], result[uid]):
                np.testing.assert_array_equal(was, now)
        seen |= result
        share = (replayed & rollouts.valid).sum() / rollouts.valid.sum()
        assert metrics["replay/share"] == pytest.approx(share) and (share > 0) == (number > 0)
        assert metrics["replay/size"] > 0
        if number:
            assert metrics["replay/age"] == pytest.approx(age[replayed & rollouts.valid].mean())
            assert set(age[replayed]) <= set(range(1, number + 1)) and not age[~replayed].any()
            check_old(method, run, learned.rollouts)
        assert all(np.isfinite(value) for value in metrics.values())
        factor[0] = 0.0
    moved = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), before, jax.device_get(learned.state.params))
    assert max(jax.tree.leaves(moved)) > 0
    assert metrics.get("max/mismatch", 0.0) < 1e-3 or run.learner.epochs * run.learner.minibatches > 1


def check_old(method, run, rollouts):
    """Old log-probs of replayed rollouts are those of sampling if the ratio is to them, and else the policy's."""
    if rollouts.old_logprobs is None:
        assert method == "arpo_replay"
        return
    tokens = np.asarray(rollouts.token_mask & rollouts.extras["replayed"][..., None])
    gap = np.abs(np.asarray(rollouts.old_logprobs) - np.asarray(rollouts.behavior_logprobs))[tokens]
    assert (gap.max() == 0) == parts.only(run.method, "replay").as_sampled


@pytest.mark.slow
@pytest.mark.parametrize("method", APART)
def test_replayed_batches_are_updates_of_their_own(method):
    """Three steps on the same problems: the fresh batch is whole, stored rollouts come as they were sampled, behind it."""
    changes = {"replay_objective": "warmup=0", "filters": "spear_clip"} if method.startswith("spear") else {}
    run, params = setup.build(tiny(method, **changes))  # texts of a policy without training cannot be read
    start, state, seen = run.source.data.get_state(), setup.initial_state(run, params), {}
    steps, again, counts = schedules.make("sync").steps(run.source, run.learner, state, {}), 0, [0]
    for number in range(3):
        run.source.set_position(run.source.position() | {"data": start})
        done = next(steps)
        finished, metrics = done.finished, done.finished.metrics | done.learned.metrics
        seen |= {uid: logprobs for uid, (logprobs, _, _) in by_uid(finished.forest, finished.rollouts).items()}
        assert finished.rollouts.valid.shape[0] == P and not finished.rollouts.extras["replayed"].any()
        for batch in finished.replayed:
            valid, known = batch.valid & batch.mask.any(-1), {row.tobytes() for row in seen.values()}
            assert batch.extras["replayed"][valid].all() and valid.any()
            assert {batch.behavior_logprobs[p, g][batch.mask[p, g]].tobytes() for p, g in np.argwhere(valid)} <= known
        updates = len(finished.replayed) * run.learner.minibatches
        assert metrics.get("replay/updates", 0) == updates and (metrics["replay/share"] > 0) == bool(finished.replayed)
        assert all(np.isfinite(value) for value in metrics.values()) and np.isfinite(metrics.get("replay/loss", 0.0))
        again += len(finished.replayed)
        counts.append(int(optax.tree.get(done.learned.state.opt_state, "ScaleByAdamState").count))
    assert again and counts[-1] > 3 * run.learner.minibatches  # Adam has counted the updates on stored rollouts too
    own = run.learner.rehearsal
    assert (own.objective is run.learner.objective) == (method == "r2vpo_replay") == (done.learned.state.replayed is None)
    assert own.as_sampled == method.startswith("spear")


@pytest.mark.slow
def test_programs_of_a_critic_serve_fresh_and_replayed_batches():
    """In packed rows a critic has one program for the shape of a batch; it sees no fields of replayed batches alone."""
    run, params = setup.build(tiny("sil", **{"learner.packed_rows": 2}))
    steps = schedules.make("sync").steps(run.source, run.learner, setup.initial_state(run, params), {})
    seen = [next(steps).learned.metrics for _ in range(2)]
    assert [one["replay/updates"] for one in seen] == [2, 2] and all(np.isfinite(one["replay/value/loss"]) for one in seen)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "pipelined(lag=1)"])
def test_priorities_reach_the_buffer_at_the_next_step(schedule):
    """The buffer has what the last update said of the groups that it learned from, and what is new since."""
    name, lag = schedule.split("(")[0], {"lag": 1} if "lag" in schedule else {}
    run, params = setup.build(tiny("sil", objective="cispo(anchor=behavior)", schedule=schedule))
    state, told = setup.initial_state(run, params), []
    for number, done in enumerate(schedules.make(name, **lag).steps(run.source, run.learner, state, {})):
        stored, state = done.position["buffer"], done.learned.state
        if number >= 2:  # the newest batch was sampled with the state before this step, also under the lag
            known = dict(zip(priorities.uids_of(told[-1][0]).tolist(), told[-1][1].tolist()))
            known.pop(-1, None)
            now = dict(zip(buffers.group_uids(stored).tolist(), stored.facts["priority"].tolist()))
            assert known and {uid: now[uid] for uid in known if uid in now} == {uid: known[uid] for uid in known if uid in now}
            assert any(uid in now for uid in known)
        told.append(jax.tree.map(np.asarray, [state.control["priorities"][one] for one in ("replayed_groups", "priorities")]))
        if number == 3:
            break


@pytest.mark.slow
def test_priorities_reach_the_buffer_beside_an_empty_batch():
    """Under a lag the next batch has those of a later update already."""
    run, params = setup.build(tiny("sil"))
    state = setup.initial_state(run, params)
    *_, done = [done for _, done in zip(range(2), schedules.make("sync").steps(run.source, run.learner, state, {}))]
    snapshot, nothing = run.learner.publish(done.learned.state), run.source.topology._replace(
        choose=lambda forest: np.zeros(len(forest.problems), bool))
    empty = dataclasses.replace(run.source, topology=nothing)
    assert empty.next(snapshot).rollouts is None
    known = dict(zip(priorities.uids_of(snapshot.knobs["replayed_groups"]).tolist(), snapshot.knobs["priorities"].tolist()))
    stored = empty.memory["buffer"]
    now = dict(zip(buffers.group_uids(stored).tolist(), stored.facts["priority"].tolist()))
    assert len(now.keys() & known.keys()) > 2 and {uid: known[uid] for uid in now if uid in known}.items() <= now.items()


def test_numbers_of_an_update_on_stored_rollouts_need_that_update():
    with pytest.raises(ValueError, match="config.replay_objective='warmup=3': these are numbers or terms, and method 'remix'"):
        setup.build(tiny("remix", replay_objective="warmup=3"))
    run, _ = setup.build(tiny("spear", replay_objective="warmup=3, coef=0.5"))
    assert run.config.replay_objective == "warmup=3, coef=0.5" and run.learner.rehearsal is not None


@pytest.mark.slow
def test_remix_switches_to_on_policy_training():
    """After two steps of four: no replay, one epoch, and the base of the KL term is the policy of that moment."""
    run, params = setup.build(tiny("remix", controllers="switch=2", replay="reuse=1.0, until=2", objective="anchor_coef=0.1"))
    state, done, updates = setup.initial_state(run, params), [], [0]
    for step in schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params)):
        done.append(step)
        updates.append(int(optax.tree.get(step.learned.state.opt_state, "ScaleByAdamState").count))
        if len(done) == 4:
            break
    metrics = [step.finished.metrics | step.learned.metrics for step in done]
    assert [one["control/epochs"] for one in metrics] == [2, 2, 1, 1]
    assert [one["replay/share"] > 0 for one in metrics] == [False, True, False, False]
    gaps = []
    for step in done:
        rollouts = step.learned.rollouts
        tokens = np.asarray(rollouts.token_mask)
        gaps.append(np.abs(np.asarray(rollouts.ref_logprobs) - np.asarray(rollouts.old_logprobs))[tokens].max())
    assert gaps[0] < 1e-6 and gaps[2] < 1e-6 and gaps[1] > 1e-4 and gaps[3] > 1e-4
    assert np.diff(updates).tolist() == [2, 2, 1, 1]


def test_rapo_learns_from_replayed_successes():
    """A group of failures has an advantage as soon as it contains its stored success, by hand; under a lag at one version."""
    factor = [1.0]
    run, params = setup.build(tiny("rapo"))
    run = with_factor(run, factor)
    start, state = run.source.data.get_state(), setup.initial_state(run, params)
    first = run.source.next(run.learner.publish(state)).rollouts
    solved, factor[0] = (first.rewards > 0.5).any(1), 0.0
    assert solved.any() and not first.extras["replayed"].any()
    for version in (0, 1):
        run.source.set_position(run.source.position() | {"data": start})
        finished = run.source.next(run.learner.publish(state.replace(step=state.step + version)))
        second = finished.rollouts
        np.testing.assert_array_equal(second.extras["replayed"].sum(1), solved)
        np.testing.assert_array_equal(second.rewards > 0.5, second.extras["replayed"])
        np.testing.assert_array_equal(second.prompt_ids, first.prompt_ids)
        assert finished.metrics["replay/share"] == solved.sum() / 16 and finished.metrics["replay/age"] == version
        advantages, _ = run.learner.estimator.update(jax.tree.map(np.asarray, second), ())
        expected = np.where(second.extras["replayed"], np.sqrt(3), -1 / np.sqrt(3)) * solved[:, None] * P / solved.sum()
        np.testing.assert_allclose(np.asarray(advantages)[..., 0], expected, rtol=1e-5)


def test_groups_of_unequal_sizes_keep_them_with_a_past_success():
    """On the same problems, of which none is solved the second time."""
    factor, sizes = [1.0], np.array([4, 2, 3, 4])
    run, params = setup.build(tiny("dart_curation", **{"sampling.group": 2, "sampling.max_group": 4}))
    run = with_factor(run, factor)
    state = setup.initial_state(run, params)
    knobs = {**run.learner.controls.proposed(state.control), "group_sizes": sizes}
    first, second = (run.source.next(run.learner.publish(state)._replace(knobs=knobs)) for factor[0] in (1.0, 0.0))
    owners = [done.forest.prompt[done.forest.ends] for done in (first, second)]
    solved = np.bincount(owners[0], first.forest.rewards[first.forest.ends] > 0.5, minlength=P) > 0
    again = second.forest.uid[second.forest.ends] <= first.forest.uid.max()
    assert solved.any() and np.bincount(owners[1]).tolist() == np.bincount(owners[0]).tolist() == sizes.tolist()
    assert (np.bincount(owners[1], again, minlength=P) == solved).all()
    assert second.rollouts.extras["replayed"].sum() == solved.sum()


def test_a_position_includes_the_buffer():
    """Two sources continue from the same place: one keeps its position, the other restores it from a checkpoint."""
    run, params = setup.build(tiny("remix"))
    state = setup.initial_state(run, params)
    run.source.next(run.learner.publish(state))
    position = run.source.position()
    stored = json.loads(json.dumps(jsonable(position)))
    state = state.replace(step=state.step + 1)
    wanted = run.source.next(run.learner.publish(state))
    assert wanted.metrics["replay/share"] > 0 and len(run.source.memory["buffer"].ends) > len(position["buffer"].ends)
    for place in (stored, position):
        run.source.set_position(place)
        result = run.source.next(run.learner.publish(state))
        jax.tree.map(np.testing.assert_array_equal, result.rollouts, wanted.rollouts)
        assert result.metrics == wanted.metrics and result.forest.texts.tolist() == wanted.forest.texts.tolist()


def test_a_rule_and_a_method_of_ones_own(monkeypatch):
    """Every sampled group returns in the next step, where it takes the place of new prompts."""
    def echo(*, groups: int = 2) -> Replay:
        return Replay(lambda rewards, valid: valid, groups=lambda born, version, prompts, rng: np.arange(groups), max_age=1)

    monkeypatch.setitem(RULES, "echo", Kind(echo))
    monkeypatch.setitem(methods.METHODS, "echoed", dataclasses.replace(
        methods.get("grpo"), slug="echoed", replay="echo(groups=9)", needs=("age", "replayed")))
    run, params = setup.build(tiny("echoed", replay="groups=3"))
    state = setup.initial_state(run, params)
    first = run.source.next(run.learner.publish(state))
    second = run.source.next(run.learner.publish(state.replace(step=state.step + 1)))
    second = second._replace(rollouts=stamped(second.rollouts, 1))
    assert second.rollouts.extras["age"].tolist() == [[0] * G] + [[1] * G] * 3 and run.source.next_uid == (P + 1) * G
    np.testing.assert_array_equal(second.rollouts.tokens[1:, :, :3], first.rollouts.tokens[:3, :, :3])
    np.testing.assert_array_equal(second.rollouts.prompt_ids[1:], first.rollouts.prompt_ids[:3])
    assert (second.rollouts.extras["current_version"] == 1).all()
    assert np.unique(second.rollouts.policy_version[1:][second.rollouts.mask[1:]]).tolist() == [0]


@pytest.mark.slow
def test_dots_rr_measures_some_problems_and_replays_half_of_a_batch():
    """Reference problems are measured in every second step and not trained; replayed ratios use stored log-probs."""
    run, params = setup.build(tiny("dots_rr", controllers="reference=6, every=2, width=16"))
    state, batches = setup.initial_state(run, params), []
    for step in schedules.make("sync").steps(run.source, run.learner, state, run.learner.frozen(state.params)):
        batches.append((step.finished, step.learned, run.source.next_uid))
        if len(batches) == 3:
            break
    rates = [finished.counts["reference_rates"] for finished, _, _ in batches]
    assert [np.isfinite(one).tolist() for one in rates] == [[True] * 6, [False] * 6, [True] * 6]
    assert all(set(one * G) <= set(range(G + 1)) for one in (rates[0], rates[2]))
    stored = batches[0][0].metrics["replay/size"] // G
    assert batches[0][0].metrics["completion/tokens"] > 1.5 * batches[1][0].metrics["completion/tokens"]  # with measured ones
    assert [uid for _, _, uid in batches][0] == (6 + P) * G and batches[0][0].counts["tried"].sum() == P * G
    assert batches[1][0].rollouts.extras["replayed"].all(1).sum() == min(stored, P // 2) > 0
    replayed = np.asarray(batches[1][1].rollouts.extras["replayed"] & batches[1][1].rollouts.valid)
    old, behavior = (np.asarray(getattr(batches[1][1].rollouts, name)) for name in ("old_logprobs", "behavior_logprobs"))
    gap = np.abs(old - behavior) * np.asarray(batches[1][1].rollouts.token_mask)
    assert gap[replayed].max() > 1e-4 > gap[~replayed].max()  # weights have changed since
    assert batches[1][1].metrics["max/old_ratio"] > 1.0001 and np.isfinite(batches[2][1].metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spear_clip", "sil", "dots_rr", "remix"])
def test_a_resumed_run_is_the_straight_one(tmp_path, capsys, method):
    """Bit for bit, after the loss of all steps behind step 2: weights, metrics of each step, the last checkpoint's buffer."""
    options = {"checkpoint.every": 2, "eval.every": 4, "samples_every": 0, "eval.problems": 1}
    options |= {"controllers": {"dots_rr": "reference=6, width=16", "remix": "switch=1"}.get(method, "")}
    loop.train(tiny(method, **options, steps=4), tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/4")
    loop.train(tiny(method, **options, steps=4), tmp_path / "resumed", resume=True)
    assert "replay buffer, at most" in capsys.readouterr().out
    result, wanted = (run_files.saved(tmp_path / name, tiny(method, **options, steps=4)) for name in ("resumed", "straight"))
    assert_same(result, wanted)
    kept = [[repeatable(line) for line in lines(tmp_path / name)] for name in ("resumed", "straight")]
    assert kept[0] == kept[1] and kept[0][-1]["replay/share"] > 0
    hosts = [next((tmp_path / name / "checkpoints/4/host").glob("*")).read_text() for name in ("resumed", "straight")]
    assert hosts[0] == hosts[1] and '"columns"' in hosts[0]
