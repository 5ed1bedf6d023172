"""All that stands against a run is said at once, by the parts that it concerns, before anything long begins."""
import dataclasses
import sys

import pytest

from jaxrl_llm import methods, replay, rewards, topologies
from jaxrl_llm.control.base import CONTROLLERS, Controller
from jaxrl_llm.learning import schedules
from jaxrl_llm.methods import __main__ as command
from jaxrl_llm.setup import parts, setup, why
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.values import Around
from jaxrl_llm.tools.registry import Conflict, Kind


def composed(method="grpo", around=Around(), **changes):
    """The lines against a configuration: unmet needs, and conflicts."""
    config = default_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()} | {"method": method})
    config = resolve(config, methods.get(method).defaults)
    made = parts.make_parts(config, 32)
    return config, made, why.unmet(made), why.conflicting(config, made, around)


def test_nothing_stands_against_the_default():
    assert composed()[2:] == ([], [])
    config, made, *_ = composed()
    why.check(config, made)


def test_all_lines_come_at_once():
    """A budget beside a filter, nothing to allocate, and a mean over rows that are cut."""
    config, made, lacks, against = composed("dapo", budget__utility="paper", budget__prompts=2, sampling__max_group=16,
                                            objective="aggregation=prompt_mean")
    assert lacks == [] and against == [
        "config.budget.utility='paper' does not go together with the filter 'dynamic_sampling' of method 'dapo'; leave it "
        "empty, or take another method, for example grpo",
        "budget.prompts=2 of at most sampling.max_group=16 completions each take 32 of the 8 x 8 of a step, which leaves "
        "nothing to allocate; raise one of the two",
        "the budget 'paper' gives prompts unequal numbers of rollouts, which are cut into rows, and "
        "aggregation='prompt_mean' would weigh each row like a prompt; set config.objective=\"aggregation=token_mean\" (or "
        "seq_mean_token_mean), or take another method"]
    with pytest.raises(ValueError) as raised:
        why.check(config, made)
    assert str(raised.value) == "\n".join(["3 things stand against this run:", *(f"- {line}" for line in against)])


def test_unmet_needs_come_first_and_with_who_could_provide_them():
    config, made, lacks, against = composed("gopd", sampling__top_k=5)
    assert lacks == ["method 'gopd' needs teacher_logprobs (from the recorder `teacher` with config.teacher.path), which this "
                     "run does not provide; estimator=gopd reads it"]
    assert against == ["method 'gopd' weighs tokens by learner over sampler probability, and top_k, top_p and min_p change "
                       "only the latter; switch them off (0, 1, 0)"]
    with pytest.raises(NotImplementedError) as raised:
        why.check(config, made)
    assert str(raised.value).startswith(f"2 things stand against this run:\n- {lacks[0]}\n- {against[0]}. Parts can be used")


def test_what_is_around_a_method_is_met_too():
    deaf = rewards.combine([rewards.make("format", pattern="a", weight=0.0)])
    late = schedules.make("pipelined", lag=2)
    lines = composed("ttrl", Around(reward=deaf, schedule=late), schedule="pipelined(lag=2)", sampling__top_p=0.5)[3]
    assert [line.partition(";")[0] for line in lines] == [
        "config.schedule='pipelined(lag=2)' divides by the sampler's probabilities, which top_k, top_p and min_p change",
        "method 'ttrl' compares the answers of the rollouts, and the reward 'format' does not extract an answer"]


def test_parts_that_the_configuration_names_are_met_too():
    lines = composed("grpo", estimator="rloo", objective="cispo(max_ratio=4, aggregation=prompt_mean) + kl(0.01)", lora__rank=2,
                     filters="dynamic_sampling", budget__utility="paper", controllers="moving_reference")[3]
    assert [line.partition(" of method")[0].partition(" gives")[0] for line in lines] == [
        "config.budget.utility='paper' does not go together with the filter 'dynamic_sampling'",
        "method 'grpo' updates the reference from full weights; LoRA does not change them; set lora.rank=0, or take another "
        "method", "the budget 'paper'"]


def test_an_engine_that_is_named_lacks_something():
    config, made, *_ = composed("luffy", sampling__engine="scan", sampling__paged_cache=True, environment="guess_number")
    assert why.unable(config, made) == [
        f"{what}, and 'scan' does not; set sampling.engine='auto' and server.url='', or leave that out" for what in (
            "environment 'guess_number' needs an engine that goes on with a trajectory after tokens of an environment",
            "sampling.paged_cache=True needs an engine that keeps caches in pages")]
    config, made, *_ = composed("aepo_advantage", server__url="http://127.0.0.1:1", server__weights="/tmp")
    with pytest.raises(ValueError, match="'aepo_advantage' needs an engine that measures the entropy .*'server' does not"):
        why.check(config, made)


def test_a_part_from_outside_declares_its_conflicts(monkeypatch):
    def windy():
        return Controller(lambda: (), lambda state: {}, lambda state, facts: state, facts=("step",), knobs=())

    calm = Conflict(("config.lora.rank", "estimator.eps"), "{part} of {method} and adapters of rank {0} with eps={1} do not "
                    "rest", "take one", lambda rank, eps: rank > eps)
    monkeypatch.setitem(CONTROLLERS, "windy", Kind(windy, conflicts=(calm,)))
    monkeypatch.setitem(methods.METHODS, "windy", dataclasses.replace(methods.get("grpo"), slug="windy", controllers="windy"))
    assert composed("windy")[3] == []
    assert composed("windy", lora__rank=4, estimator="eps=0.5")[3] == [
        "controller 'windy' of windy and adapters of rank 4 with eps=0.5 do not rest; take one"]


@pytest.mark.parametrize("words, status, told", (
    (["grpo"], False, ["nothing stands against a run of grpo"]),
    (["gigpo", "--config.lora.rank=4"], True, ["method 'gigpo' needs obs (from an environment, config.environment), which this "
                                               "run does not provide; estimator=gigpo reads it"]),
    (["prorl", "--config.lora.rank=4", "--config.optimizer.schedule=linear"], True, [
        "phase 'first': method 'prorl' resets the optimiser, with which optimizer.schedule='linear' would begin again and not "
        "end at 0; set optimizer.schedule=constant, or take another method",
        "phase 'first': method 'prorl' updates the reference from full weights; LoRA does not change them; set lora.rank=0, or "
        "take another method"]),
    (["grop", "--config.eval.every=-1"], True, [
        "config.eval.every is -1; it must be at least 0", "config.method='grop': Unknown method 'grop'. Did you mean 'grpo'? "
        "Near: "])))
def test_the_command_says_why(monkeypatch, capsys, words, status, told):
    monkeypatch.setattr(sys, "argv", ["methods", *words, "--why"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == status and len(lines) >= len(told) and all(map(str.startswith, lines, told))


@pytest.mark.parametrize("words, told", (
    (["grpo", "--why", "--config.sampling.grup=1"], "no key 'sampling.grup'; near: sampling.group"),
    (["grpo", "--why", "--sampling.group=1"], "write --config.KEY=VALUE"), (["--why"], "--why needs the NAME of a method"),
    (["grpo", "--wy"], "cannot read '--wy'")))
def test_what_the_command_cannot_read(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["methods", *words])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("topology, need", (
    ("by_rule", "method.allocation (from a part under config.allocation)"),
    ("rounds", "estimator.wants_more (from an estimator that has it)"),
    ("sized", "group_sizes (from a controller that sets it)"),
    ("budgets", "config.budget.utility (from a value of this key)")))
def test_a_topology_that_is_named_has_its_needs(topology, need):
    assert setup.against("grpo", {"topology": topology}) == [f"method 'grpo' needs {need}, which this run does not provide; "
                                                           f"topology={topology} reads it"]


def test_needs_are_said_with_the_texts_that_have_them():
    def ends(**changes):
        return {line.split()[3]: line.partition("does not provide")[2] for line in setup.against("grpo", changes)}

    assert ends(estimator="gigpo", objective="+ nll(0.1, expert)")["step"] == "; estimator=gigpo reads it"
    assert ends(objective="ppo_clip + nll(0.1, expert)") == {"expert": "; objective=ppo_clip + nll(0.1, expert) reads it"}
    assert ends(recorders="teacher")["teacher_logprobs"] == "; recorders=teacher reads it"
    assert ends(filters="sws, ui_s1")["match"] == "; filters=ui_s1 reads it"


def test_every_run_has_what_rollouts_are_made_of(tmp_path, monkeypatch):
    (tmp_path / "alive.py").write_text(
        "from jaxrl_llm.control import Filter\n\n\n"
        "def alive():\n    return Filter(lambda one: one.mask.any((1, 2)) & one.valid.any(1), needs=('mask', 'valid'))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert setup.against("grpo", {"filters": "alive:alive"}) == []


def test_a_topology_that_wraps_others_is_named(tmp_path, monkeypatch):
    """It wraps what the parts imply, with numbers of its own."""
    (tmp_path / "wraps_others.py").write_text(
        "def narrow(inner, *, group, most=0):\n    assert most == 3\n    return inner._replace(most=group + most)\n")
    monkeypatch.syspath_prepend(tmp_path)
    known = {"prompts": 4, "group": 2, "most": 8, "rule": topologies.make_rule("dars")}
    made = topologies.make("wraps_others:narrow", {"method.allocation"}, known, {"most": 3})
    rule = topologies.make(None, {"method.allocation"}, known, {})
    assert (made.most, rule.most) == (5, 8)


@pytest.mark.parametrize("changes, lines", (
    ({"allocation": "dars", "replay": "recent_groups"}, [
        "the allocation rule 'dars' gives prompts unequal numbers of rollouts, and stored groups would take the places of "
        "some prompts; leave out one of them, or take a rule that replaces single rollouts, for example past_success"]),
    ({"allocation": "dars", "replay": "past_success"}, []),
    ({"estimator": "ppo_gae", "controllers": "dart_curation"}, [
        "the controller 'dart_curation' gives prompts unequal numbers of rollouts, which critics do not support; leave out one "
        "of them"]),
    ({"allocation": "dars", "topology": "single"}, [
        "the topology 'single' does not read method.allocation, which this method has; leave that out, or take one that does: "
        "by_rule; it is the topology of the method, or implied by its parts"]),
    ({"allocation": "dars", "estimator": "reinforce_ada"}, [
        "the topology 'rounds' does not read method.allocation, which this method has; no topology reads estimator.wants_more "
        "and method.allocation together, so leave one of them out; it is the topology of the method, or implied by its parts",
        "the allocation rule 'dars' and the estimator 'reinforce_ada' both say how many rollouts a prompt gets; leave one of "
        "the two out"])))
def test_conflicts_name_the_parts_of_a_composition(changes, lines):
    assert setup.against("grpo", changes) == lines


WRONG = {"sampling.group": 0, "lora.alpha": -1.0, "optimizer.b1": 3.0, "critic.kind": "haed", "eval.every": -1,
         "environment_waits": "perhaps", "estimator": "rlo", "objective": "gspo(clip_high=-1) + kll(0.1)",
         "controllers": "remix, moving_reference"}


def test_every_wrong_key_and_every_wrong_text_is_in_one_report():
    """Ranges and words of all rooms, then the texts, each with its key."""
    lines, loss = setup.against("grpo", WRONG), "config.objective='gspo(clip_high=-1) + kll(0.1)'"
    assert [line.partition(". Allowed")[0].partition(". Did")[0] for line in lines] == [
        "config.sampling.group is 0; it must be at least 1",
        "config.eval.every is -1; it must be at least 0",
        "config.lora.alpha is -1.0; give a finite number above 0",
        "config.optimizer.b1 is 3.0; give 0 or more and less than 1, or -1: the optimiser's own",
        "Unknown config.critic.kind 'haed'", "Unknown config.environment_waits 'perhaps'",
        "config.estimator='rlo': Unknown estimator 'rlo'",
        f"{loss}: in gspo(clip_high=-1): objective 'gspo': clip_high=-1; give 0 or more",
        f"{loss}: in kll(0.1): Unknown term 'kll'",
        "config.controllers='remix, moving_reference': controllers 'remix' and 'moving_reference' both set reference; leave "
        "one of them out"]
    config = default_config()
    config.update_from_flattened_dict(WRONG)
    with pytest.raises(ValueError) as raised:
        setup.build(config)
    assert str(raised.value) == "\n  ".join(["10 faults of the composition:", *lines])


def test_engines_meshes_stages_and_replays_are_lines_of_the_report(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text(
        "from jaxrl_llm.sampling.stages.base import Stage\n\n\n"
        "def late():\n    return Stage('late', needs=('lenth', 'rewards'), provides=('lateness',))\n\n\n"
        "def later():\n    return Stage('later', needs=('lateness', 'wall_clock'))\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("needy", None)
    lines = setup.against("grpo", {
        "replay": "recent_groups", "replay_objective": "gspo", "mesh.fsdp": 3, "sampling.engine": "scan",
        "sampling.paged_cache": True, "stages": "needy:late, needy:later"})
    assert [line.partition("; ")[0].partition(", which")[0] for line in lines] == [
        "mesh data=-1 x fsdp=3 x tensor=1 does not fit 1 devices: the sizes must multiply to that number",
        "sampling.paged_cache=True needs an engine that keeps caches in pages, and 'scan' does not",
        "the stage 'needy:late' of config.stages needs lenth", "the stage 'needy:later' of config.stages needs wall_clock",
        "method 'grpo' has replay_estimator='' and replay_objective='gspo', and its replay has no updates of its own"]
    assert "lateness" in lines[3] and "lateness" not in lines[2]


def test_a_replay_of_a_critic_alone_needs_a_critic(monkeypatch):
    monkeypatch.setitem(replay.base.RULES, "aged", Kind(
        lambda: replay.Replay(lambda rewards, valid: valid, capacity=8, updates=1, critic_only=True)))
    assert setup.against("ppo", {"replay": "aged"}) == []
    assert setup.against("grpo", {"replay": "aged"}) == [
        "the replay 'aged' trains a critic alone, and method 'grpo' has none; leave critic_only out"]


def test_every_phase_is_in_the_report_with_its_name():
    """A phase that cannot be composed hides no other."""
    found = setup.against("grpo", {"steps": 9, "phases": "a(steps=3, estimator=rlo), b(steps=3, objective='+ kl(-1)'), "
                                   "c(rewards='exact, numeric')"})
    assert [line.partition(":")[0] for line in found] == ["phase 'a'", "phase 'b'", "phase 'c'"]
    assert "config.estimator='rlo'" in found[0] and "coef=-1" in found[1] and "have the same weight" in found[2]


def test_stages_may_read_what_a_method_has_made_and_topologies_what_the_run_has(tmp_path, monkeypatch):
    (tmp_path / "reading.py").write_text(
        "from jaxrl_llm.sampling.stages import Stage\nfrom jaxrl_llm.topologies import single, topology\n\n"
        "def shifted():\n    return Stage('shifted', needs=('greedy_rewards',))\n\n"
        "@topology(takes={'world': 'environment', 'more': 'wants'})\n"
        "def worldly(prompts, group, world, more):\n    return single(prompts=prompts, group=group)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert setup.against("remax", {"stages": "reading:shifted"}) == []
    assert "needs greedy_rewards, which neither" in setup.against("grpo", {"stages": "reading:shifted"})[0]
    try:
        found = setup.against("grpo", {"topology": "reading:worldly"})
        assert [line.partition(",")[0] for line in found] == [
            "topology 'reading:worldly' takes world from 'environment'", "topology 'reading:worldly' takes more from 'wants'"]
    finally:
        topologies.TOPOLOGIES.pop("worldly", None)


@pytest.mark.parametrize("fact, changes", (
    ("expected", {"budget.utility": "paper", "budget.prompts": 64}), ("gradient_norms", {"allocation": "gvm_raft"}),
    ("reference_rates", {"controllers": "{}, dots_rr"}), ("replayed_groups", {"method": "sil"}),
    ("group_size", {"controllers": "{}, dart_curation"}), ("measured_tried", {"controllers": "{}, solvable"})))
def test_a_fact_is_told_by_parts_of_the_run(monkeypatch, fact, changes):
    """A fact that a part tells under a condition is missing in a run without the condition, and is in one with it."""
    monkeypatch.setitem(CONTROLLERS, "curious", Kind(
        lambda: Controller(lambda: 0, lambda state: {}, lambda state, facts: state, facts=(fact,), knobs=())))
    [line] = setup.against("grpo", {"controllers": "curious"})
    assert line.startswith(f"controller 'curious': no part of this run tells the fact {fact!r}, ")
    assert line.endswith("leave the controller out, or name the part that does")
    changes = {"controllers": "{}", **changes}
    row = methods.get(changes.pop("method", "grpo"))
    changes["controllers"] = ", ".join(filter(None, [row.controllers, changes["controllers"].format("curious")]))
    assert setup.against(row.slug, changes) == []


def test_options_that_parts_do_not_take_are_in_the_same_report(tmp_path, monkeypatch):
    """Of tasks, rewards, environments, schedules and sets of evaluation, between wrong keys and wrong parts of the method."""
    (tmp_path / "optional.py").write_text("def task(*, size=4):\n    raise RuntimeError('it is not made')\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = setup.against("grpo", {
        "sampling.group": 0, "task": "arithmetic(levl=sub2, weight=2), optional:task(sise=3)", "rewards": "format(weight=2)",
        "environment": "tool_use(turn=3)", "schedule": "pipelined(lags=2)", "eval.sets": "arithmetic(levels=digit, every=2)",
        "estimator": "rlo"})
    assert [line.partition(". Allowed")[0].partition(". Did")[0].partition("; give")[0] for line in lines] == [
        "config.sampling.group is 0; it must be at least 1",
        "config.task='arithmetic(levl=sub2, weight=2), optional:task(sise=3)': Unknown keyword of task 'arithmetic' 'levl'",
        "config.task='arithmetic(levl=sub2, weight=2), optional:task(sise=3)': task 'optional:task' takes (*, size=4): got an "
        "unexpected keyword argument 'sise'",
        "config.eval.sets='arithmetic(levels=digit, every=2)': Unknown keyword of task 'arithmetic' 'levels'",
        "config.environment='tool_use(turn=3)': Unknown keyword of environment 'tool_use' 'turn'",
        "config.rewards='format(weight=2)': reward 'format' needs the keyword 'pattern', which has no default",
        "config.schedule='pipelined(lags=2)': Unknown keyword of schedule 'pipelined' 'lags'",
        "config.estimator='rlo': Unknown estimator 'rlo'"]


@pytest.mark.parametrize("schedule, line", (
    ("pipelined(lag=-1)", "config.schedule='pipelined(lag=-1)': schedule 'pipelined': lag=-1; give 0 or more, finite"),
    ("sync, sync", "config.schedule='sync, sync' names 2 schedules; give one of sync, pipelined, or your own module:function, "
                   "with its numbers in brackets"),
    ("pipelined(lag=", "config.schedule='pipelined(lag=': cannot read 'pipelined(lag='; write name, or name(option=value, "
                       "option=value)")))
def test_a_wrong_schedule_is_one_line_beside_others(schedule, line):
    first, second = setup.against("grpo", {"schedule": schedule, "controllers": "siri(period=0)"})
    assert first == line and second.startswith("config.controllers='siri(period=0)': ")
