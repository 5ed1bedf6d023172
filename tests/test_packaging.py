"""What `pip install .` ships: every folder with code."""
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[1]


def test_every_folder_with_code_is_a_package_that_is_installed():
    shipped = set(find_packages(str(ROOT), include=["jaxrl_llm", "jaxrl_llm.*"]))
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "jaxrl_llm").rglob("*.py")}
    assert len(folders) > 10
    assert {".".join(folder.parts) for folder in folders} == shipped
