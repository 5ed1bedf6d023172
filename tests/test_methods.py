"""The catalogue: every row can be built, the page is up to date, errors help."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from jaxrl_llm import advantages, control, methods, objectives, replay
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.methods import own_row, provision, texts
from jaxrl_llm.methods.base import DEFAULTS

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "methods.md"


@pytest.mark.parametrize("slug", methods.names())
def test_every_row_can_be_built_and_runs_or_says_what_it_lacks(slug):
    row = methods.get(slug)
    assert row.title and row.equation and "\n" not in row.equation
    estimator, objective = methods.build(slug, max_len=128, feature_size=19)
    estimator.init(), objective.init()
    lacks = provision.lacks(row, estimator, objective)
    assert methods.lacks(slug) == tuple(lacks) and (slug in methods.runnable()) == (not lacks)


def test_the_page_marks_methods_that_do_not_run_everywhere():
    runnable, elsewhere, known = methods.runnable(), methods.runnable_elsewhere(), len(methods.names())
    catalogue = PAGE.read_text()
    papers = {paper for row in methods.METHODS.values() for paper in row.arxiv}
    assert papers == {*re.findall(r"\]\(https://arxiv.org/abs/([\d.]+)\)", catalogue)}
    assert catalogue.count("**not provided: ") == known - len(runnable)
    assert not {*runnable} & {*elsewhere} and {"gigpo", "spiral", "rank_grpo", "swe_rl_reward"} <= {*elsewhere}
    assert not {"portool", "oprl", "luffy", "sil"} & {*elsewhere}  # an environment alone is not enough


def test_missing_fields_are_named_with_their_possible_provider():
    """Every row that does not run names all its missing fields; no field is both provided and awaited."""
    assert not provision.everywhere() & {*provision.elsewhere(), *provision.AWAITED}
    assert not provision.elsewhere() & provision.AWAITED.keys()
    runnable, waiting = methods.runnable(), {}
    assert {"grpo", "dapo", "poise", "v0_5", "ppo", "knapsack_rl"} <= set(runnable) and len(runnable) >= 77
    for slug in set(methods.names()) - set(runnable):
        for lack in methods.lacks(slug):
            waiting.setdefault(lack.what, lack.who)
    own = {name for name in waiting if not name.startswith(("filter ", "controller "))}
    assert own == provision.elsewhere() | provision.AWAITED.keys()  # all are read by a method
    assert methods.lacks("gigpo")[-1] == ("traj", "an environment, config.environment")
    assert ("teacher_logprobs", "the recorder `teacher` with config.teacher.path") in methods.lacks("gopd")
    assert {"acereason_temperature", "prorl", "nsr", "psr", "oneshot_entropy", "scalerl"} <= set(runnable)


def test_an_environment_provides_for_methods_of_turns():
    for slug in ("gigpo", "hgpo", "salt", "grpo"):
        parts = methods.build(slug)
        assert not provision.lacks(methods.get(slug), *parts, provision.of_environment(parts[1]))
    parts = methods.build("ui_s1")
    assert "match" in {lack.what for lack in provision.lacks(methods.get("ui_s1"), *parts, provision.of_environment(parts[1]))}
    walks = provision.of_environment(parts[1], {"step": "turn", "match": "turn"}, contexts=2)
    assert not provision.lacks(methods.get("ui_s1"), *parts, walks)
    assert "match" not in provision.of_environment(parts[1], {"match": "turn"}, contexts=2)


def test_every_estimator_and_objective_is_in_the_catalogue():
    rows = methods.METHODS.values()
    for what, known in (("estimator", advantages.names()), ("objective", objectives.names())):
        named = {part.name for row in rows for key in (what, f"replay_{what}") if (part := row.part(key))}
        assert named >= set(known)


def test_page_is_up_to_date():
    assert PAGE.read_text() == methods.markdown(), "run: python -m jaxrl_llm.methods --write docs/methods.md"


def test_unknown_method_gets_the_nearest_match():
    with pytest.raises(ValueError, match="'drgrop'. Did you mean 'dr_grpo'"):
        methods.get("drgrop")
    with pytest.raises(ValueError) as raised:
        methods.get("grop")
    assert "Did you mean 'grpo'" in str(raised.value)  # the same letters, before others that are spelled as much like it
    assert len(str(raised.value)) < 250 and "python -m jaxrl_llm.methods" in str(raised.value)


def test_what_a_method_lacks_follows_from_what_is_provided():
    row, parts = methods.get("grpo"), methods.build("grpo")
    assert provision.lacks(row, *parts) == []
    later = dataclasses.replace(row, slug="later", needs=("node", "moon_phase"), controllers="curriculum")
    who = {lack.what: lack.who for lack in provision.lacks(later, *parts)}
    assert sorted(who) == ["controller curriculum", "moon_phase", "node"]
    assert who["node"] == "a topology of trees" and "of your own" in who["moon_phase"]
    assert [lack.what for lack in provision.lacks(later, *parts, given=("node", "moon_phase"))] == ["controller curriculum"]


def test_budget_and_overrides_reach_the_parts():
    with pytest.raises(ValueError, match="max_len"):
        methods.build("dr_grpo")
    with pytest.raises(ValueError, match="larger than 1"):
        methods.build("grpo", objective="dual_clip=0.5")
    with pytest.raises(ValueError, match="keyword of estimator 'grpo' 'epsilon'"):
        methods.build("grpo", estimator="epsilon=1e-6")


def test_command_prints_every_method():
    result = subprocess.run([sys.executable, "-m", "jaxrl_llm.methods"], capture_output=True, text=True, check=True,
                            cwd=PAGE.parent.parent)
    assert all(slug in result.stdout for slug in methods.names())


def command(*arguments):
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=PAGE.parent.parent)


def test_command_prints_the_row_of_a_method():
    lines = dict(line.split(maxsplit=1) for line in command("jaxrl_llm.methods", "poise").stdout.splitlines())
    row = methods.get("poise")
    assert lines["method"] == "poise" and lines["title"] == row.title and lines["equation"] == row.equation
    assert lines["paper"] == "https://arxiv.org/abs/2605.07579" and "group_size 2" in lines["setting"]
    assert lines["estimator"] == "poise" and lines["objective"] == row.objective
    assert not {"omits", "replay", "filters"} & lines.keys()  # it has none
    scalerl, gopd = (command("jaxrl_llm.methods", name).stdout for name in ("scalerl", "gopd"))
    assert f"omits           {methods.get('scalerl').omits}\n" in scalerl and "controllers     pass_rate\n" in scalerl
    assert "not provided    teacher_logprobs (the recorder `teacher` with config.teacher.path)" in gopd


def test_command_answers_an_unknown_method_with_near_ones_and_as_it_was_started():
    for started, usage in ((("jaxrl_llm.methods",), "python -m jaxrl_llm.methods"),
                           (("jaxrl_llm.commands.cli", "methods"), "jaxrl_llm methods")):
        done = command(*started, "drgrop")
        assert done.returncode == 2 and done.stderr.startswith(f"usage: {usage} [-h]") and not done.stdout
        assert "Unknown method 'drgrop'. Did you mean 'dr_grpo'?" in done.stderr


def test_command_writes_a_row_as_a_module_that_is_the_row(tmp_path, monkeypatch):
    path = tmp_path / "mine_of_gvm.py"
    done = command("jaxrl_llm.methods", "gvm_raft_pp", "--write", str(path), "--config.objective=+ kl(0.01)")
    assert done.returncode == 0 and f"{path} runs by --config.method=mine_of_gvm:row, with PYTHONPATH={tmp_path}" in done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    row, mine = methods.get("gvm_raft_pp"), methods.get("mine_of_gvm:row")
    assert mine == dataclasses.replace(row, slug="mine_of_gvm", objective=f"{row.objective} + kl(0.01)")
    again = command("jaxrl_llm.methods", "gvm_raft_pp", "--write", str(path))
    assert again.returncode == 2 and "is there already; give another name, or delete it" in again.stderr
    for arguments, message in ((["--write", str(tmp_path / "mine.md")], "mine.md is no name of a module"),
                               (["--write", str(tmp_path / "class.py")], "class.py is no name of a module"),
                               (["--write", str(tmp_path / "random.py")], "there is a module 'random' on the path"),
                               (["--write", str(tmp_path / "optax.py")], "there is a module 'optax' on the path"),
                               (["--config.estmator=rloo"], "Did you mean 'estimator'?"),
                               (["--config.estimator=rlo"], "config.estimator='rlo': Unknown estimator 'rlo'")):
        done = command("jaxrl_llm.methods", "grpo", *arguments)
        assert done.returncode == 2 and message in done.stderr and [file.name for file in tmp_path.glob("*.*")] == [path.name]


def test_every_row_is_itself_again_as_a_module():
    for row in methods.METHODS.values():
        space: dict = {}
        exec(own_row.source(row, row.slug), space)
        assert space["row"] == dataclasses.replace(row, known_as=())  # peers know the row of the catalogue alone


def test_needs_are_known_names():
    """Something provides or could provide each need of a row, and nothing a name that is spelled otherwise."""
    elsewhere = provision.elsewhere() | provision.AWAITED.keys()
    for slug, row in methods.METHODS.items():
        estimator, objective = methods.build(slug, max_len=128, feature_size=19)
        assert provision.needs_of(row, estimator, objective) <= provision.provided(row, estimator) | elsewhere, slug
    known = {field.name for field in dataclasses.fields(Rollouts)} | elsewhere | provision.everywhere()
    assert {name for row in methods.METHODS.values() for name in row.needs} - known == {
        "expert", "hinted", "hint_mask", "replayed", "values"}  # of experts, replays and critics
    misspelt = dataclasses.replace(methods.get("grpo"), needs=("old_logprob",))
    assert not {"old_logprob"} <= provision.provided(misspelt, methods.build("grpo")[0]) | elsewhere


def test_settings_are_known_and_those_that_the_trainer_takes_are_counts():
    for row in methods.METHODS.values():
        assert set(row.defaults) <= set(DEFAULTS), row.slug
        assert all(type(row.defaults.get(name, 1)) is int and row.defaults.get(name, 1) >= 1
                   for name in ("epochs", "minibatches", "group_size")), row.slug
    assert {name for row in methods.METHODS.values() for name in row.defaults} == set(DEFAULTS)


def test_filters_and_controllers_of_rows_exist():
    for row in methods.METHODS.values():
        for key, make in (("filters", control.make_filter), ("controllers", control.make)):
            assert all(make(name, **numbers) for name, numbers in row.parts(key)), row.slug
        assert all(replay.make(name, **numbers).most(problems=8, per_step=8) >= 1 for name, numbers in row.parts("replay"))
    named = {key: {part.name for row in methods.METHODS.values() for part in row.parts(key)} for key in texts.SLOTS}
    assert named["replay"] == {*replay.names()} and named["guidance"] == {"experts", "adhint"}
    assert named["controllers"] >= {*control.names()} and named["filters"] >= {*control.filter_names()}


def test_texts_of_rows_read_as_they_are_written():
    for row in methods.METHODS.values():
        for key, slot in texts.SLOTS.items():
            text = getattr(row, key)
            assert texts.parts(key, f" {slot.sign} ".join(map(str, row.parts(key)))) == row.parts(key), (row.slug, key)
            assert bool(text) == bool(row.parts(key))


def test_values_without_a_name_take_the_parameters_in_their_order():
    assert texts.parts("estimator", "grpo(1e-4, singleton=one)") == (("grpo", {"eps": 1e-4, "singleton": "one"}),)
    assert texts.parts("topology", "by_rule") == (("by_rule", {}),)
    for key, text, said in (
            ("estimator", "grpo(1e-4, eps=1e-6)", "sets eps twice"),
            ("estimator", "rloo, grpo", "names 2 parts; give one estimator"),
            ("estimator", "gpro(1e-4)", "Unknown estimator 'gpro'. Did you mean 'grpo'?"),
            ("filters", "dynamic_sampling(1)", "more values without a name than the part has numbers: none"),
            ("filters", "dynamic_sampling) + (d3s", "cannot read"), ("objective", "ppo_clip, cispo", "cannot read")):
        with pytest.raises(ValueError, match=re.escape(said)):
            texts.parts(key, text)


def test_the_page_names_settings_omissions_and_parts_for_ones_own_loop():
    page = methods.markdown()
    gspo = next(line for line in page.splitlines() if line.startswith("| `gspo` "))
    assert "| minibatches 4 |" in gspo
    scalerl = next(line for line in page.splitlines() if line.startswith("| `scalerl` "))
    assert "`pass_rate`" in scalerl and "*omits forced interruption of long thoughts" in scalerl
    rapo = next(line for line in page.splitlines() if line.startswith("| `rapo` "))
    assert "`pass_rate(at_least=32)`" in rapo
    reset = next(line for line in page.splitlines() if line.startswith("| `reference_reset` | "))
    assert reset.endswith("| **controller** `reference_reset` |")
    d3s = next(line for line in page.splitlines() if line.startswith("| `d3s` | "))
    assert "`down_sample`" in d3s and "D3S: the rollouts" in d3s
    assert "| **filter** `lightningrl`, `accuracy`, `efficiency`, `has_signal` |" in page
    columns = [line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| `")]
    assert set(columns) == {8, 4}  # no cell breaks its table


def test_the_figure_of_the_guide_has_every_key_with_parts_that_exist(tmp_path):
    from jaxrl_llm.experiments import draw_parts
    shown = [*(part for station in draw_parts.STATIONS for part in station.parts), draw_parts.CONTROLLERS]
    assert sorted(key for key, _ in shown) == sorted(texts.SLOTS)
    assert [fault for key, example in shown for fault in texts.faults(key, example, {"max_len": 8})] == []
    done = command("jaxrl_llm.experiments.draw_parts", f"--out={tmp_path / 'parts.png'}")
    assert done.returncode == 0 and min(path.stat().st_size for path in (
        tmp_path / "parts.png", PAGE.parent / "figures/parts.png")) > 10_000


def test_rows_of_asynchronous_systems_name_how_old_rollouts_are():
    """Where a paper's rollouts are by weights of earlier steps, its setting is that schedule, not a gap of the row."""
    lags = {"llamarl": 1, "dart_tis": 1, "dart_curation": 1, "areal_decoupled_ppo": 4, "scalerl": 8}
    assert {slug: methods.METHODS[slug].defaults["schedule"] for slug in lags} == {
        slug: f"pipelined(lag={lag})" for slug, lag in lags.items()}
