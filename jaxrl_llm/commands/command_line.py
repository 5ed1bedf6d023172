"""Functions shared by every experiment script: program cache, allocator, quiet libraries, errors without tracebacks."""
import ast
import ctypes.util
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import app, flags, logging

from jaxrl_llm.commands.cli import COMMANDS
from jaxrl_llm.setup import config_page
from jaxrl_llm.setup.variants import MACHINES, PUBLISHED
from jaxrl_llm.tools import lifetime
from jaxrl_llm.tools.registry import one_of

flags.DEFINE_string("compilation_cache", "~/.cache/jaxrl_llm/xla", "Compiled programs are kept here; '' turns it off.")

EXPECTED = (ValueError, NotImplementedError, OSError, RuntimeError)  # errors whose message says what to do
_CONFIGS = Path(__file__).parents[1] / "configs"  # those that are installed with the package
_ALLOCATOR_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always"  # keep freed memory, in large pages


def jemalloc() -> str:
    """The library jemalloc of the Python environment, or else that of the system; '' where neither has one."""
    environment = Path(sys.prefix, "lib", "libjemalloc.so.2")  # scripts/get_jemalloc.sh, or conda
    if environment.exists():
        return str(environment)
    return ctypes.util.find_library("jemalloc") or ""  # starts up to four programs, so it comes last


def use_jemalloc() -> None:
    """Restarts this program with jemalloc as its allocator, if that is installed and jax has no accelerator.

    XLA allocates the memory of a program anew at every call, and glibc returns such large blocks to the system at once: a fifth
    of a training step on CPUs went into touching new pages. An LD_PRELOAD that is already set, even to '', is respected.
    """
    if "LD_PRELOAD" in os.environ:
        if os.environ.get("MALLOC_CONF") == _ALLOCATOR_SETTINGS:  # already restarted; child programs should not inherit it
            del os.environ["MALLOC_CONF"], os.environ["LD_PRELOAD"]
        return
    if sys.platform != "linux" or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
        return
    library = jemalloc()
    if library:
        settings = {"LD_PRELOAD": library, "MALLOC_CONF": _ALLOCATOR_SETTINGS}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)


def run(main: Callable[..., None], *required: str, words: bool = False) -> None:
    """Parses the flags (`required` ones must be given) and calls `main()`; expected errors end with a message, exit code 1.

    With `words` the command takes arguments that are not flags, and `main` gets their list; else they are refused.
    JAXRL_LLM_TRACEBACK=1 shows where an error came from.
    """
    def start(arguments):
        import jax  # after the flags, so that --help is quick
        logging.set_verbosity(logging.WARNING)  # orbax reports every rename
        if flags.FLAGS.compilation_cache:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(flags.FLAGS.compilation_cache))
        main(*([arguments[1:]] if words else []))

    use_jemalloc()
    lifetime.end_with_parent()
    flags.mark_flags_as_required(required)
    try:
        app.run(start, flags_parser=functools.partial(parse, words=words))
    except EXPECTED as error:
        sys.exit(message_of(error))
    except KeyboardInterrupt as error:
        sys.exit("\n".join(["interrupted", *getattr(error, "__notes__", ())]))


def message_of(error: Exception) -> str:
    """What the terminal shows of an expected error that is being handled; with JAXRL_LLM_TRACEBACK=1 it is raised again."""
    if os.environ.get("JAXRL_LLM_TRACEBACK"):
        raise error
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}\n(JAXRL_LLM_TRACEBACK=1 shows where)"


def print_table(rows: Sequence[Mapping[str, str | int | float]], title: str) -> None:
    """Prints rows with the same columns, `{column: value}`, on the terminal."""
    from rich.console import Console
    from rich.table import Table
    table = Table(title=title)
    for name, value in rows[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    def text(x):
        return x if isinstance(x, str) else f"{x:,}" if isinstance(x, int) else f"{x:.4g}"
    for row in rows:
        table.add_row(*map(text, row.values()))
    Console(width=130).print(table)


def shipped_config(argument: str) -> str:
    """Replaces the name in `--config=arithmetic:smollm2` by the path of the file that is installed with the package.

    Other arguments stay unchanged. Raises ValueError for a name that no such file has.
    """
    name = re.fullmatch(r"--config=(\w+)(:.*)?", argument)
    if name is None:
        return argument
    one_of("config file", name[1], [file.stem for file in _CONFIGS.glob("[!_]*.py")])
    return f"--config={_CONFIGS / name[1]}.py{name[2] or ''}"


def _config_files(folder: Path) -> dict[str, str]:
    """The text of each config file of a folder, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("[!_]*.py"))}


def recipe_titles(folder: Path = _CONFIGS) -> dict[str, str]:
    """The first docstring line of each config file of the package, by name; "" for a file without one."""
    return {name: (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0] for name, text in _config_files(folder).items()}


def shipped_configs() -> list[str]:
    """The config files that are installed with the package, one per line: name and first line of the docstring.

    A star is in front of those that have a variant for each published model, made by `recipes.sized`.
    """
    stars = {name: "*" if "sized(" in text else " " for name, text in _config_files(_CONFIGS).items()}
    return ["--config=NAME of the config files that are installed, or the path of your own:", "",
            *(f"  {stars[name]} {name:15}{title}" for name, title in recipe_titles().items()), "",
            "* for published models: NAME:MODEL-MACHINE, e.g. gsm8k:qwen2.5_1.5b-h100-8 (game and tools: cpu, h100)", "",
            f"    MODEL          {', '.join(PUBLISHED)}", f"    MACHINE        {', '.join(MACHINES)}"]


def _purpose() -> str:
    """What the running script says of itself, with the command by which it was started."""
    script = sys.modules["__main__"]
    purpose = script.__doc__ or ""
    for name in COMMANDS if script.__spec__ is not None else ():  # started by the command, not by its path
        purpose = purpose.replace(f"python experiments/{name}.py", f"jaxrl_llm {name}")
    return purpose


def help_text() -> str:
    """The purpose of the running script, its flags and, if it has --config, all keys of a configuration."""
    parts = [_purpose(), flags.FLAGS.main_module_help(), flags.FLAGS.module_help(sys.modules[__name__])]
    if "config" in flags.FLAGS:
        parts += ["", *shipped_configs(), "", config_page.help_text()]
    return "\n".join(parts)


def parse(arguments: list[str], words: bool = False) -> list[str]:
    """Parses flags by absl; returns the name of the program and the arguments that are not flags.

    Unknown keys of the configuration, what its file refuses and, without `words`, arguments that are not flags are plain errors
    without a stack.
    """
    if {"--help", "-h", "-help"} & set(arguments):
        print(help_text())
        sys.exit()
    try:
        left = flags.FLAGS([shipped_config(argument) for argument in arguments])
    except flags.Error as error:
        raised = error.__context__
        if isinstance(raised, Exception) and str(raised).startswith("Error whilst parsing config file"):
            raise raised.__context__ or raised from None  # of the file itself; ml_collections made its stack a text
        usage = [line for line in _purpose().splitlines() if line.startswith("  ")]
        sys.exit("\n".join([str(error), *usage[:2], "(--help lists the flags)"]))
    except (AttributeError, KeyError) as error:  # of ml_collections: a KeyError, often nested, names the key and similar ones
        reason = error
        while isinstance(reason, Exception) and reason.args:
            reason = reason.args[0]
        missing = {given.partition("=")[0].removeprefix("--config.") for given in arguments if given.startswith("--config.")}
        from jaxrl_llm.setup.keys import near_keys
        hint = near_keys(sorted(missing), "config.")
        raise ValueError("the configuration has no key " + " ".join(str(reason).split()) + hint) from error
    if left[1:] and not words:
        raise ValueError(f"not a flag: {', '.join(map(repr, left[1:]))}; this command takes flags alone. Write --name=value, "
                         "and a value with spaces in quotes: --config.objective=\"clip_high=0.28, dual_clip=3\"")
    return left
