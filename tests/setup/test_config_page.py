"""The page of all keys: none is missing, none is empty, defaults are the real ones, and the file in docs/ is up to date."""
import ast
from pathlib import Path

import pytest

from jaxrl_llm.setup import config_page
from jaxrl_llm.setup.config import default_config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEYS = [key for _, keys in config_page.sections() for key in keys if key.default is not None]


def leaves(config, prefix=""):
    for name, value in config.items():
        yield from leaves(value, f"{prefix}{name}.") if hasattr(value, "items") else [(prefix + name, value)]


def test_every_key_is_there_once_with_its_default_and_a_meaning():
    real = dict(leaves(default_config()))
    assert len(KEYS) == len(real) > 70
    assert {key.name: ast.literal_eval(key.default) for key in KEYS} == real
    assert not [key.name for key in KEYS if len(key.meaning) < 5]


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == config_page.markdown(), f"run: python -m jaxrl_llm.setup.config_page --write docs/{PAGE.name}"
    text, help_text = PAGE.read_text(), config_page.help_text()
    assert "| `tried` | the stage 'score' | i32[N] of the training problems, rollouts that" in text.partition("## Facts")[2]
    for key in KEYS:
        assert text.partition("## Knobs")[0].count(f"| `{key.name}` |") == 1 and f"    {key.name} ({key.default})" in help_text


@pytest.mark.parametrize("source, result", [
    ('def f(c):\n    """Room."""\n    c.a = 1  # one, # two\n    d.b = 2  # other\n', [("a", "1", "one, # two")]),
    ('def f(c):\n    """Room."""\n    c.g = ConfigDict()  # group\n    c.g.x = "# no comment"\n',
     [("g", None, "group"), ("g.x", "'# no comment'", "")]),
    ('x = 1\ndef f():\n    """No room."""\n    return 1  # one\n', []),
])
def test_keys_are_assignments_with_the_comment_of_their_line(source, result):
    assert [key for _, keys in config_page.rooms(source) for key in keys] == result
