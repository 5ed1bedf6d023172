"""Which code of a run lies outside the package, and that it comes back."""
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm import advantages, rewards, tasks
from jaxrl_llm.engines.measures import MEASURES
from jaxrl_llm.learning.schedules.base import SCHEDULES
from jaxrl_llm.store import own_code
from jaxrl_llm.tools import registry

MODULE = """
from jaxrl_llm.advantages import estimator, stateless


@estimator
def of_{name}():
    return stateless(lambda rollouts: rollouts.rewards)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to import from; what is registered and imported there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    known, imported = dict(advantages.base.ESTIMATORS), set(sys.modules)
    yield tmp_path
    for table, old in ((advantages.base.ESTIMATORS, known), (sys.modules, imported)):
        for name in set(table) - set(old):
            del table[name]


def test_a_module_that_registered_something_is_named_and_imported_again(place):
    (place / "my_module.py").write_text(MODULE.format(name="module"))
    before = own_code.origins()
    importlib.import_module("my_module")
    added = [place for place in own_code.origins() if place not in before]
    assert added == [{"module": "my_module", "file": str(place / "my_module.py")}]
    for form in ("my_module", *added):
        del sys.modules["my_module"], advantages.base.ESTIMATORS["of_module"]
        own_code.load([form], place)
        assert "of_module" in advantages.base.ESTIMATORS


MEASURE = """
from jaxrl_llm.engines.measures import measure


@measure("of_my_measures")
def measured(config):
    return None
"""
SCHEDULE = """
from jaxrl_llm.learning.schedules import sync
from jaxrl_llm.learning.schedules.base import Schedule, schedule


@schedule
def of_my_schedules():
    return Schedule(sync.steps)
"""


def test_a_configuration_file_imports_modules_of_measures_and_schedules_without_the_path(place, monkeypatch):
    folder = place / "parts"
    folder.mkdir()
    (folder / "my_measures.py").write_text(MEASURE)
    (folder / "my_schedules.py").write_text(SCHEDULE)
    (place / "my_config.py").write_text("import my_measures, my_schedules\n" + MODULE.format(name="config"))
    tables = (MEASURES, "of_my_measures"), (SCHEDULES, "of_my_schedules")
    with monkeypatch.context() as known:
        known.syspath_prepend(folder)
        for name in ("my_measures", "my_schedules"):
            importlib.import_module(name)
        found = [place for place in own_code.origins() if isinstance(place, dict) and place["module"].startswith("my_")]
    assert found == [{"module": name, "file": str(folder / f"{name}.py")} for name in ("my_measures", "my_schedules")]
    monkeypatch.setattr(sys, "path", list(sys.path))
    for table, name in tables:
        del table[name]
    for entry in found:
        del sys.modules[entry["module"]]
    own_code.load([str(place / "my_config.py"), *found], place)
    assert "of_config" in advantages.base.ESTIMATORS
    for table, name in tables:
        del table[name]


@pytest.mark.slow
def test_modules_of_functions_that_a_configuration_names_are_found_again_without_the_path(tmp_path, monkeypatch):
    """A task of a package, and a reward of a module that only its processes import."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").touch()
    (tmp_path / "my_package/my_tasks.py").write_text(
        "import my_numbers\nfrom jaxrl_llm import tasks\n\n\ndef sums(): return tasks.make('arithmetic', level='digit')\n")
    (tmp_path / "my_numbers.py").touch()
    (tmp_path / "my_rewards.py").write_text("def score(completion, answer, problem): return len(completion)\n")
    with monkeypatch.context() as known:
        known.syspath_prepend(tmp_path)
        known.setattr(registry, "NAMED", set())
        tasks.make("my_package.my_tasks:sums")
        rewards.make("isolated", target="my_rewards:score")
        assert "my_rewards" not in sys.modules
        found = [place for place in own_code.origins() if isinstance(place, dict) and place["module"].startswith("my_")]
    assert found == [{"module": "my_package.my_tasks", "file": str(tmp_path / "my_package/my_tasks.py")},
                     {"module": "my_rewards", "file": str(tmp_path / "my_rewards.py")}]
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_package.my_tasks", "my_package", "my_numbers"):
        del sys.modules[name]
    own_code.load(found, tmp_path)
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1
    assert len(tasks.make("my_package.my_tasks:sums").heldout) > 0
    scored = rewards.combine([rewards.make("isolated", target="my_rewards:score", workers=1)])
    assert scored(["abc"], [""], [None]).total == [3.0]
    for name in ("my_package.my_tasks", "my_package", "my_numbers", "my_rewards"):
        del sys.modules[name]


def test_a_module_whose_file_is_gone_too_is_a_warning(tmp_path):
    with pytest.warns(RuntimeWarning, match="no_such_module, cannot be imported"):
        own_code.load([{"module": "no_such_module", "file": str(tmp_path / "no_such_module.py")}], tmp_path)
    assert str(tmp_path) not in sys.path


@pytest.mark.slow
@pytest.mark.parametrize("variant", ("", ":small"))
def test_a_configuration_file_is_named_without_its_variant(place, variant):
    file = place / "mine.py"
    file.write_text("from ml_collections import ConfigDict\n\n"
                    "def get_config(variant='large'):\n    return ConfigDict({'a': variant})\n")
    code = f"""
from absl import flags
from ml_collections import config_flags
from jaxrl_llm.engines.measures import MEASURES
from jaxrl_llm.learning.schedules.base import SCHEDULES
from jaxrl_llm.store import own_code
config = config_flags.DEFINE_config_file("config")
flags.FLAGS(["program", "--config={file}{variant}"])
assert config.value.a == "{variant[1:] or 'large'}"
print(own_code.origins())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {
        "PYTHONPATH": str(Path(own_code.__file__).parents[2])})
    assert done.stdout == f"{[str(file)]}\n", done.stderr


def test_a_file_is_imported_once_and_a_missing_one_is_a_warning(place):
    file = place / "my_file.py"
    file.write_text(MODULE.format(name="file") + "\nimport sys\nsys.loads = getattr(sys, 'loads', 0) + 1\n")
    own_code.load([str(file)], place)
    own_code.load([str(file)], place)
    assert "of_file" in advantages.base.ESTIMATORS and sys.loads == 1
    del sys.loads
    with pytest.warns(RuntimeWarning, match="gone.py, cannot be imported.*what it registered is unknown"):
        own_code.load([str(place / "gone.py")], place)
    with pytest.warns(RuntimeWarning, match="no_such_module_anywhere, cannot be imported"):
        own_code.load(["no_such_module_anywhere"], place)


def test_a_file_that_was_imported_as_such_is_named_as_a_file(place):
    """A run of a comparison imports the configuration file of the comparison; its code comes back in any other process."""
    file = place / "my_config.py"
    file.write_text(MODULE.format(name="config"))
    before = own_code.origins()
    own_code.load([str(file)])
    added = [place for place in own_code.origins() if place not in before]
    assert added == [str(file)]
    for module in [name for name in sys.modules if name.endswith("my_config")]:
        del sys.modules[module]
    del advantages.base.ESTIMATORS["of_config"]
    own_code.load(added)
    assert "of_config" in advantages.base.ESTIMATORS


@pytest.mark.parametrize("where", ("run", "."))
def test_the_file_of_a_run_that_moved_is_found_with_the_run(place, where):
    run = place / "moved" / "run"
    run.mkdir(parents=True)
    (run.parent if where == "." else run).joinpath("my_other_file.py").write_text(MODULE.format(name="moved"))
    own_code.load([str(place / "where it was" / "my_other_file.py")], run)
    assert "of_moved" in advantages.base.ESTIMATORS
