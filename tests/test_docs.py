"""The documents are correct: links lead somewhere, commands and settings exist, names can be imported, examples run."""
import ast
import importlib
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_llm.commands import cli
from jaxrl_llm.engines import row_keys
from jaxrl_llm.setup.config import default_config

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
YOURS = {"configs/mine.py"}  # written by the reader, as the page says


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without fenced blocks and inline code, where brackets are not links and a hash is not a heading."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as hosts of repositories make them."""
    titles = re.findall(r"^#+ +(.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(script, flags given to it) of every command of a page, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"experiments/benchmark\.py(?: ([a-z]+)\b)?",
                  lambda found: f"experiments/benchmarks/{found[1] or 'step'}.py", text)
    text = re.sub(r"^jaxrl_llm (\w+)", lambda result: script_of(result[1]), text, flags=re.MULTILINE)
    return [(result[1], re.findall(r"(?<![\w-])--([\w.]+)", result[2]))
            for result in re.finditer(r"((?:experiments|scripts)/[\w/]+\.(?:py|sh))([^\n`#|]*)", text)]


def script_of(command: str) -> str:
    """The file that `jaxrl_llm COMMAND` runs."""
    return cli.COMMANDS[command][0].removeprefix("jaxrl_llm.").replace(".", "/") + ".py"


def flags_of(script: str) -> set[str]:
    """Names of the flags that a script defines, and those that all share."""
    names = {"config", "compilation_cache", "help"} if script.endswith(".py") else {"help"}
    for call in ast.walk(ast.parse((ROOT / script).read_text())) if script.endswith(".py") else ():
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr.startswith("DEFINE_"):
            name = call.args[0].value
            names |= {name, f"no{name}"} if call.func.attr == "DEFINE_bool" else {name}
    return names


def is_key(dotted: str) -> bool:
    node = default_config()
    for part in dotted.split("."):
        if not hasattr(node, "keys") or part not in node:
            return False
        node = node[part]
    return True


def test_the_list_of_pages_is_complete():
    assert {"README.md", "docs/concepts.md", "docs/guides/method.md", "CONTRIBUTING.md"} <= {str(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = urllib.parse.unquote(target).partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            known = anchors(file.resolve().relative_to(ROOT))
            assert anchor in known, f"{page} links to {target}; {name or page} has the anchors {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_exist_with_their_flags(page):
    for script, given in commands(text_of(page)):
        assert (ROOT / script).is_file(), f"{page} runs {script}, which is not there"
        known = flags_of(script)
        for flag in given:
            if not flag.startswith("config.") and script.endswith(".py"):
                assert flag in known, f"{page}: {script} has no flag --{flag}; it has {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_settings_and_modules_exist(page):
    text = text_of(page)
    for key in re.findall(r"--config\.([a-z][a-z_.]*)", text):
        assert is_key(key), f"{page} sets --config.{key}, which is no key of the configuration"
    sections = "|".join(key for key, value in default_config().items() if hasattr(value, "keys"))
    for key in re.findall(rf"`((?:{sections})\.[a-z_]+)[`=]", text):
        file = re.fullmatch(r"\w+\.(py|md|png|json)", key)
        assert file or is_key(key), f"{page} names the setting {key}, which is no key of the configuration"
    for config in re.findall(r"(configs/\w+\.py)", text):
        assert config in YOURS or (ROOT / config).is_file(), f"{page} names {config}, which is not there"
    for module in re.findall(r"python -m (jaxrl_llm[\w.]*)", text):
        assert importlib.util.find_spec(module), f"{page} runs the module {module}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_lines_of_bash_begin_with_a_command(page):
    for language, code in FENCE.findall(text_of(page)):
        lines = code.splitlines() if language == "bash" else []
        assert not options_alone(lines), f"{page} has options without a command in a block of bash: {options_alone(lines)}"


def options_alone(lines: list[str]) -> list[str]:
    """The lines that begin with an option and continue no line."""
    return [line for before, line in zip(["", *lines], lines) if line.lstrip().startswith("--") and not before.endswith("\\")]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_list_of_sections_at_the_top_is_complete(page):
    top, *sections = re.split(r"^## +", FENCE.sub("", text_of(page)), flags=re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]\(#[^)]*\)$", top, re.MULTILINE)
    assert not listed or listed == [section.partition("\n")[0] for section in sections]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_other_tasks_of_the_small_pretrained_model_have_room_for_an_explanation(page):
    """`arithmetic.py:smollm2` cuts completions at 24 tokens; a CPU needs the update in parts then."""
    for line in re.sub(r"\\\n\s*", " ", text_of(page)).splitlines():
        if "configs/arithmetic.py:smollm2" in line and re.search(r"--config\.task=\"?(jsonl|dataset|reasoning_gym)\b", line):
            given = dict(re.findall(r"--config\.([\w.]+)=(\d+)", line))
            assert int(given.get("sampling.max_tokens", 24)) >= 256 and int(given.get("learner.micro_batches", 1)) >= 4, line


def resolve(dotted: str):
    """The module or the attribute with this name."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            result = getattr(result, part)
        return result
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_of_the_library_exist(page):
    for name in set(re.findall(r"`(jaxrl_llm(?:\.\w+)+)[`(]", text_of(page))):
        try:
            resolve(name)
        except (ModuleNotFoundError, AttributeError):
            pytest.fail(f"{page} names {name}, which cannot be imported")


def test_messages_that_the_page_of_troubles_quotes_are_those_of_the_code():
    """Each text in quotation marks that is no value; `...` in it stands for what differs."""
    files = [path.read_text() for path in sorted((ROOT / "jaxrl_llm").rglob("*.py"))]
    texts = [node.value for file in files for node in ast.walk(ast.parse(file))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    page = " ".join(FENCE.sub("", text_of(Path("docs/troubleshooting.md"))).split())
    quoted = re.findall(r'"`?([a-zA-Z][^"=`]* [^"=`]*)`?"', page)
    assert len(quoted) >= 2
    for part in (part.strip(" ()") for message in quoted for part in message.split("...")):
        assert any(part in text for text in texts), f"docs/troubleshooting.md quotes {part!r}, which no message says"


def test_pages_derive_keys_of_trajectories_as_the_sampler_does():
    """`fold_in` takes 32 bits of a number: one call with a uid is not what is computed."""
    uid = 5 * 2**32 + 7
    made = row_keys(jax.random.key(3), np.array([[uid]]))[0, 0]
    halves = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), uid >> 32), uid % 2**32)
    assert (jax.random.key_data(made) == jax.random.key_data(halves)).all()
    key = re.compile(r"`((?:fold_in\()+[\w ]*key, uid[^`]*)`")
    written = {page.name: [re.sub(r"\w+ key", "KEY", formula) for formula in key.findall(text_of(page))] for page in PAGES}
    pages = ("architecture.md", "numerics.md")
    assert {name: formulas for name, formulas in written.items() if formulas} == dict.fromkeys(
        pages, ["fold_in(fold_in(KEY, uid >> 32), uid mod 2^32)"])


def missing_tests(text: str) -> list[str]:
    """The tests named in a text (`tests/FILE.py`, `tests/FILE.py::NAME`) that do not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    return [f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name
            and not re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_tests_that_a_page_names_exist(page):
    assert not missing_tests(text_of(page))


def test_the_checks_fail_where_they_should():
    assert missing_tests("`tests/test_docs.py`, `tests/none.py`, `tests/test_docs.py::test_none`") == [
        "tests/none.py::", "tests/test_docs.py::test_none"] and "tests/hostile/" in text_of(Path("docs/security.md"))
    assert anchors(Path("docs/troubleshooting.md")) >= {"recompilationerror", "updates-are-refused-or-training-diverged"}
    result = commands("python experiments/show.py runs/x \\\n  --nopage --bogus=1")
    assert result == [("experiments/show.py", ["nopage", "bogus"])]
    assert commands("```bash\njaxrl_llm show runs/x --out=y\n```") == [("experiments/show.py", ["out"])]
    assert "nopage" in flags_of("experiments/show.py") and "bogus" not in flags_of("experiments/show.py")
    assert options_alone(["a \\", "  --b=1", "--c=2"]) == ["--c=2"] and options_alone(["--a=1 \\", "--b"]) == ["--a=1 \\"]
    assert is_key("sampling.group") and not is_key("sampling.groups") and not is_key("steps.x")
    with pytest.raises(AttributeError):
        resolve("jaxrl_llm.maths.masked.nothing")


@pytest.mark.slow
def test_python_examples_run(tmp_path):
    """The examples of each page, one after the other as a reader would run them, all in one new process."""
    pages = [page for page in PAGES if page == Path("README.md") or page.parent == Path("docs/guides")]
    script = tmp_path / "examples.py"
    blocks = [(str(page), "\n".join(code for language, code in FENCE.findall(text_of(page)) if language == "python"))
              for page in pages]
    run = "exec(compile({1!r}, {0!r}, 'exec'), {{'__name__': 'example'}})"
    script.write_text("\n".join(run.format(*block) for block in blocks))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[1.1 0. ]" in done.stdout  # as the page on rewards says
    assert sum(bool(code) for _, code in blocks) >= 4
