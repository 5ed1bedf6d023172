"""Runs of compositions by name are those of the rows that name the same parts; rows of one's own resume as others do."""
import json
import subprocess
import sys

import pytest
import run_files
import tiny_config

from jaxrl_llm import methods
from jaxrl_llm.methods import own_row
from jaxrl_llm.runs import loop


def tiny(**changes):
    config = tiny_config.get_config()
    config.update_from_flattened_dict({
        "steps": 2, "model.num_layers": 1, "checkpoint.every": 1, "eval.every": 0, "learner.epochs": 1,
        "learner.minibatches": 2, **changes})
    return config


@pytest.mark.slow
def test_a_composition_by_name_is_the_row_that_names_its_parts(tmp_path, capsys):
    parts = {"estimator": "rloo", "objective": "cispo(max_ratio=4) + kl(0.01)", "filters": "dynamic_sampling"}
    mine = methods.Method(slug="sum", title="", equation="", **parts)
    loop.train(tiny(method="grpo", **parts), tmp_path / "named")
    said = " ".join(capsys.readouterr().out.split())
    assert "composition A = rloo; loss = cispo(max_ratio=4) + kl(0.01); filters = dynamic_sampling" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(methods.METHODS, "sum", mine)
        loop.train(tiny(method="sum"), tmp_path / "row")
    run_files.assert_same(run_files.saved(tmp_path / "named", tiny(**parts)), run_files.saved(tmp_path / "row", tiny(**parts)))


@pytest.mark.slow
def test_a_row_of_ones_own_runs_resumes_and_is_read_again(tmp_path, monkeypatch):
    """Its two steps, the second after a resume, have the weights of the row that it copies; `show` finds the module itself."""
    assert own_row.write(methods.get("gspo"), tmp_path / "code" / "my_gspo.py") == "my_gspo:row"
    monkeypatch.syspath_prepend(tmp_path / "code")
    config = {"method": "my_gspo:row", "objective": "clip_high=0.3"}
    loop.train(tiny(**config, steps=1), tmp_path / "mine")
    with pytest.warns(RuntimeWarning, match="steps: 1 -> 2"):
        loop.train(tiny(**config), tmp_path / "mine", resume=True)
    loop.train(tiny(method="gspo", objective="clip_high=0.3"), tmp_path / "gspo")
    run_files.assert_same(run_files.saved(tmp_path / "mine", tiny(**config)),
                          run_files.saved(tmp_path / "gspo", tiny(method="gspo", objective="clip_high=0.3")))
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["config"]["method"] == "my_gspo:row"
    command = [sys.executable, "-m", "jaxrl_llm.commands.cli", "show", str(tmp_path / "mine")]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0 and "my_gspo:row" in shown.stdout, shown.stderr
    assert "objective = clip_high=0.3" in shown.stdout
    sys.modules.pop("my_gspo", None)
