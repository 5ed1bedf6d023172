"""A run folder belongs to one configuration; nothing overwrites a run by accident."""

import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import warnings

import ml_collections
import pytest

from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.stored import stored_config
from jaxrl_llm.store.workdir import config_changes, open_workdir, resolve_config


def make_config(**overrides):
    config = ml_collections.ConfigDict({"seed": 0, "model": {"width": 64, "sizes": (1, 2), "name": None}, "lr": 1e-3})
    config.half = config.model.get_oneway_ref("width") // 2
    config.update_from_flattened_dict(overrides)
    return config


def recorded(path, config, resume=False):
    work = open_workdir(path, config, resume)
    work.record()
    return work


def add_checkpoint(path, step=10):
    (path / "checkpoints" / str(step)).mkdir(parents=True)


def test_fresh_run_records_configuration_and_software(tmp_path):
    opened = recorded(tmp_path / "a" / "run", make_config())
    assert (opened.path, opened.resume, opened.changes) == (tmp_path / "a" / "run", False, [])
    assert opened.checkpoints == tmp_path / "a" / "run" / "checkpoints"
    text = (opened.path / "config.json").read_text()
    assert json.loads(text) == {
        "schema_version": 4,
        "config": {"half": 32, "lr": 0.001, "model": {"name": None, "sizes": [1, 2], "width": 64}, "seed": 0},
    }
    assert text.index('"half"') < text.index('"lr"') < text.index('"model"') < text.index('"seed"')
    (start,) = json.loads((opened.path / "environment.json").read_text())["starts"]
    import jax

    assert start["packages"]["jax"] == jax.__version__ and start["python"].startswith("3.")
    assert sorted(os.listdir(opened.path)) == ["config.json", "environment.json"]


def test_same_configuration_without_checkpoints_starts_again(tmp_path):
    for count in (1, 2):
        assert not recorded(tmp_path, make_config()).resume
        assert len(json.loads((tmp_path / "environment.json").read_text())["starts"]) == count


def test_parts_of_a_row_that_changed_are_said_on_a_resume(tmp_path):
    """Once, by key, and not for keys whose change the configuration says itself."""
    config = ml_collections.ConfigDict({"method": "mine:row", "estimator": ""})
    open_workdir(tmp_path, config, parts={"estimator": "grpo", "objective": "ppo_clip"}).record()
    add_checkpoint(tmp_path)
    said = (r"with parts of the method 'mine:row' that changed since its last start: objective: \"ppo_clip\" -> \"gspo\"$")
    for warned in (True, False):
        work = open_workdir(tmp_path, config, True, {"estimator": "grpo", "objective": "gspo"})
        with pytest.warns(RuntimeWarning, match=said) if warned else warnings.catch_warnings(action="error"):
            work.record()
    config.estimator = "rloo"
    with pytest.warns(RuntimeWarning, match="with a changed configuration") as seen:
        open_workdir(tmp_path, config, True, {"estimator": "rloo", "objective": "gspo"}).record()
    assert len(seen) == 1
    last = json.loads((tmp_path / "environment.json").read_text())["starts"][-1]
    assert last["parts"] == {"estimator": "rloo", "objective": "gspo"}


def test_a_key_of_the_whole_run_says_what_changed_in_its_phases(tmp_path):
    config = ml_collections.ConfigDict({"method": "mine:row", "estimator": ""})
    open_workdir(tmp_path, config, parts={"a.estimator": "grpo", "b.estimator": "grpo", "b.objective": "gspo"}).record()
    add_checkpoint(tmp_path)
    config.estimator = "rloo"
    with pytest.warns(RuntimeWarning) as seen:
        open_workdir(tmp_path, config, True, {"a.estimator": "rloo", "b.estimator": "rloo", "b.objective": "cispo"}).record()
    assert [str(one.message).rpartition("start: ")[2] for one in seen][1:] == ['b.objective: "gspo" -> "cispo"']


def test_checkpoints_without_resume_are_refused_with_the_way_on(tmp_path):
    recorded(tmp_path, make_config())
    add_checkpoint(tmp_path)
    with pytest.raises(FileExistsError, match="holds checkpoints.*--resume"):
        recorded(tmp_path, make_config())
    assert recorded(tmp_path, make_config(), resume=True).resume
    assert recorded(tmp_path, make_config(), resume="auto").resume


def test_auto_starts_where_there_is_nothing(tmp_path):
    assert not recorded(tmp_path / "new", make_config(), resume="auto").resume
    (tmp_path / "new" / "checkpoints" / "10.orbax-checkpoint-tmp").mkdir(parents=True)  # an unfinished save is nothing
    assert not recorded(tmp_path / "new", make_config(), resume="auto").resume


def test_resume_needs_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to resume.*missing"):
        recorded(tmp_path / "missing", make_config(), resume=True)
    assert not (tmp_path / "missing").exists()
    recorded(tmp_path, make_config())
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        recorded(tmp_path, make_config(), resume=True)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_another_configuration_is_refused_key_by_key(tmp_path, resume):
    recorded(tmp_path, make_config())
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError) as caught:
        recorded(tmp_path, make_config(lr=0.01, **{"model.width": 32}), resume=resume)
    assert "(half: 32 -> 16; lr: 0.001 -> 0.01; model.width: 64 -> 32)" in str(caught.value)
    assert "or delete it" in str(caught.value)
    add_checkpoint(tmp_path)
    with pytest.raises(
        ValueError, match="Choose another --workdir, or continue that run with the new values: --resume"
    ):
        recorded(tmp_path, make_config(lr=0.01), resume=resume)
    assert (tmp_path / "config.json").read_bytes() == before


def test_explicit_resume_takes_the_change_and_keeps_the_old_file(tmp_path):
    recorded(tmp_path, make_config())
    add_checkpoint(tmp_path)
    for lr in (0.01, 0.02):
        with pytest.warns(RuntimeWarning, match=f"changed configuration: lr: .* -> {lr}$"):
            assert recorded(tmp_path, make_config(lr=lr), resume=True).resume
        assert json.loads((tmp_path / "config.json").read_text())["config"]["lr"] == lr
    assert [json.loads((tmp_path / f"config.{i}.json").read_text())["config"]["lr"] for i in (0, 1)] == [0.001, 0.01]


def test_changes_name_added_removed_and_retyped_keys():
    old = {"a": 1, "b": {"c": True, "gone": None}, "same": [1, 2], "nan": float("nan"), "empty": {}}
    new = {"a": 1.0, "b": {"c": True}, "same": [1, 2], "nan": float("nan"), "empty": {}, "z": "x"}
    assert config_changes(old, new) == ["a: 1 -> 1.0", "b.gone: null -> (absent)", 'z: (absent) -> "x"']


def test_values_that_json_cannot_hold_are_named():
    config = make_config()
    config.model.activation = max
    with pytest.raises(TypeError, match="config.model.activation is a builtin_function_or_method"):
        resolve_config(config)


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"schema_version": 1, "con', "is no run configuration"),
        ("[]", "is no run configuration"),
        ('{"schema_version": 5, "config": {}}', "schema version 5, this release reads 1 to 4"),
    ],
)
def test_damaged_or_foreign_config_file(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        recorded(tmp_path, make_config())


@pytest.mark.parametrize(("version", "alpha"), [(1, 4.0), (2, 16.0)])
def test_adapters_keep_the_scale_of_their_training(tmp_path, version, alpha):
    """Version 1 multiplied A by alpha / rank, here 16 / 4, at the start: these matrices are an adapter of scale 1."""
    lora = {"lora": {"rank": 4, "alpha": 16.0}}
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": version, "config": make_config(**lora).to_dict()}))
    add_checkpoint(tmp_path)
    assert stored_config(tmp_path).lora.alpha == alpha
    right = make_config(lora={"rank": 4, "alpha": alpha})
    for resume in (True, "auto"):
        assert open_workdir(tmp_path, right, resume=resume).changes == []
        with pytest.raises(ValueError, match=f"lora.alpha={alpha}, and lora.alpha=8.0 .*--config.lora.alpha={alpha}"):
            open_workdir(tmp_path, make_config(lora={"rank": 4, "alpha": 8.0}), resume=resume)


def test_controllers_were_control_in_earlier_runs(tmp_path):
    """A run of version 2 continues with the same numbers of its controllers, and with its method's other parts."""
    config = default_config().to_dict() | {"method": "siri", "controllers": "period=40"}
    earlier = {"control" if key == "controllers" else key: value for key, value in config.items()
               if key not in ("filters", "topology", "recorders", "replay_estimator", "replay_objective", "phases", "stages")}
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 2, "config": earlier}))
    add_checkpoint(tmp_path)
    stored = stored_config(tmp_path)
    assert (stored.method, stored.controllers, stored.filters) == ("siri", "period=40", "") and "control" not in stored
    assert open_workdir(tmp_path, ml_collections.ConfigDict(config), resume="auto").changes == []


@pytest.mark.parametrize("method, text, balance, expected", [
    ("grpo", "kl_coef=0.1", 0.0, "+ kl(0.1)"), ("siri", "", 0.0, ""), ("grpo", "", 0.01, "+ balance(0.01)"),
    ("dapo", "clip_high=0.3, kl_coef=linear(start=0.4, end=0), kl_estimator=k2", 0.02,
     "clip_high=0.3 + kl(linear(start=0.4, end=0), estimator=k2) + balance(0.02)"),
    ("luffy", "entropy_coef=0.01", 0.0, "+ entropy(0.01)"), ("remix", "kl_coef=0.1", 0.0, "anchor_coef=0.1"),
    ("rec_opmd", "kl_coef=0.2, clip_high=0.3", 0.0, "clip_high=0.3 + kl(0.4, estimator=k2, against=old)"),
    ("rec_opmd", "regulariser=none", 0.0, "+ kl(0.0, estimator=k2, against=old)"), ("rec_ring", "kl_coef=0.2", 0.0, ""),
    ("rec_family", "regulariser=forward_kl", 0.0, "+ nll(0.1, on=all)")])
def test_terms_were_numbers_in_earlier_runs(tmp_path, method, text, balance, expected):
    config = default_config().to_dict() | {"method": method, "objective": expected}
    earlier = config | {"objective": text, "learner": config["learner"] | {"balance": balance}}
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 2, "config": earlier}))
    add_checkpoint(tmp_path)
    assert stored_config(tmp_path).objective == expected and "balance" not in stored_config(tmp_path).learner
    assert open_workdir(tmp_path, ml_collections.ConfigDict(config), resume="auto").changes == []


@pytest.mark.parametrize("method, text, expected", [
    ("prorl", "+ kl(0.01, against=old)", "ppo_clip(clip_high=0.4) + kl(0.01, against=old)"),
    ("prorl", "clip_low=0.1 + kl(0.01, against=behavior)",
     "ppo_clip(clip_high=0.4, clip_low=0.1) + kl(0.01, against=behavior)"),
    ("rec_opmd", "+ kl(0.01) + entropy(0.1)", "rec_family(clip=none) + kl(0.01) + entropy(0.1)"),
    ("prorl", "+ kl(0.01)", "+ kl(0.01)"), ("grpo", "+ kl(0.01, against=old)", "+ kl(0.01, against=old)"),
    ("mine:row", "+ kl(0.01, against=old)", "+ kl(0.01, against=old)")])
def test_a_divergence_replaced_every_other_one_in_earlier_runs(tmp_path, method, text, expected):
    config = default_config().to_dict() | {"method": method, "objective": text}
    for version, now in ((3, expected), (4, text)):
        (tmp_path / "config.json").write_text(json.dumps({"schema_version": version, "config": config}))
        assert stored_config(tmp_path).objective == now


def test_damaged_environment_does_not_stop_a_run(tmp_path):
    (tmp_path / "environment.json").write_text("{")
    recorded(tmp_path, make_config())
    assert len(json.loads((tmp_path / "environment.json").read_text())["starts"]) == 1


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="resume='yes'; allowed: True, False, 'auto'"):
        recorded(tmp_path, make_config(), resume="yes")
    with pytest.raises(ValueError, match="'http://bucket/run' is a URL of another kind; give a local or mounted folder, or gs://"):
        recorded("http://bucket/run", make_config())


@pytest.mark.parametrize("name", ("star**dir", "a*b", "q?x", "lr[1e-4]", "a\\b", "gs:"))
def test_a_folder_in_which_orbax_loses_checkpoints_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=re.escape(f"{name!r} as a pattern or an address")):
        open_workdir(tmp_path / name / "run", make_config())
    for usual in ("sp ace", "a:b", "{a}", "lr=1e-4,b=2", "a]b", "%20", "ünï"):
        open_workdir(tmp_path / usual, make_config())


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to workdir .*file/run"):
        recorded(tmp_path / "file" / "run", make_config())


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="cannot write to workdir"):
        recorded(tmp_path / "run", make_config())


def test_read_only_file_system(tmp_path):
    """A real one, mounted: not even root may write there."""
    body = f"""
        from ml_collections import ConfigDict
        from jaxrl_llm.store.workdir import open_workdir
        open_workdir("{tmp_path}/run", ConfigDict({{"seed": 1}})).record()
    """
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
             f'mount -t tmpfs -o ro tmpfs "{tmp_path}" && exec "$@"', "sh"]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let a test mount a file system")
    done = subprocess.run([*mount, sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot write to workdir {tmp_path}/run: Read-only file system; check its permissions" in done.stderr


@pytest.mark.filterwarnings("ignore:.*with a changed configuration")
@pytest.mark.parametrize("lr", (0.001, 0.01), ids=("same", "changed"))
def test_failing_write_leaves_the_old_files(tmp_path, lr):
    """A limit on file size makes write() fail as a full disk does."""
    recorded(tmp_path, make_config())
    add_checkpoint(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "environment.json")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        with pytest.raises(OSError, match="cannot write to workdir .*check its permissions and free space"):
            recorded(tmp_path, make_config(lr=lr), resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.json", "environment.json"]


def test_nothing_is_written_before_the_record(tmp_path):
    recorded(tmp_path, make_config())
    add_checkpoint(tmp_path)
    before = (tmp_path / "config.json").read_text()
    work = open_workdir(tmp_path, make_config(lr=0.5), resume=True)
    assert (tmp_path / "config.json").read_text() == before and work.changes == ["lr: 0.001 -> 0.5"]
    assert not (tmp_path / "config.0.json").exists()
