"""What every experiment script shares: kept programs and memory, quiet libraries, errors without tracebacks."""
import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import app, flags, logging

flags.DEFINE_string("compilation_cache", "~/.cache/jaxrl_llm/xla", "Compiled programs are kept here; '' turns it off.")

_ALLOCATOR_SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always"  # keep what is freed, in large pages


def use_jemalloc() -> None:
    """Starts this program again with jemalloc as its allocator, where that is installed and jax has no accelerator.

    XLA takes the memory of a program anew at every call, and glibc returns such large blocks to the system at once: a fifth of
    a training step on CPUs went into touching new pages. An LD_PRELOAD that is already set, if only to '', is left alone.
    """
    if "LD_PRELOAD" in os.environ:
        if os.environ.get("MALLOC_CONF") == _ALLOCATOR_SETTINGS:  # done; not for the programs that this one starts
            del os.environ["MALLOC_CONF"], os.environ["LD_PRELOAD"]
        return
    if sys.platform != "linux" or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
        return
    library = ctypes.util.find_library("jemalloc")
    if library:
        settings = {"LD_PRELOAD": library, "MALLOC_CONF": _ALLOCATOR_SETTINGS}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | settings)


def run(main: Callable[[], None], *required: str) -> None:
    """Parses the flags (those `required` must be given) and calls `main()`; expected errors end with a message, exit code 1.

    JAXRL_LLM_TRACEBACK=1 shows where an error came from.
    """
    def start(_):
        import jax  # after the flags, so that --help is quick
        logging.set_verbosity(logging.WARNING)  # orbax reports every rename
        if flags.FLAGS.compilation_cache:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(flags.FLAGS.compilation_cache))
        main()

    use_jemalloc()
    flags.mark_flags_as_required(required)
    try:
        app.run(start, flags_parser=parse)
    except (ValueError, NotImplementedError, OSError, RuntimeError) as error:
        if os.environ.get("JAXRL_LLM_TRACEBACK"):
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        sys.exit(f"{type(error).__name__}: {error}{notes}\n(JAXRL_LLM_TRACEBACK=1 shows where)")
    except KeyboardInterrupt as error:
        sys.exit("\n".join(["interrupted", *getattr(error, "__notes__", ())]))


def print_table(rows: Sequence[Mapping[str, str | int | float]], title: str) -> None:
    """Rows of the same columns, `{column: value}`, for the terminal."""
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


def parse(arguments: list[str]) -> list[str]:
    """Flags as absl reads them; a key that the configuration lacks is a plain error, not a stack trace."""
    try:
        return app.parse_flags_with_usage(arguments)
    except (AttributeError, KeyError) as error:  # of ml_collections: a KeyError, often nested, says which key and what is near
        reason = error
        while isinstance(reason, Exception) and reason.args:
            reason = reason.args[0]
        raise ValueError("the configuration has no key " + " ".join(str(reason).split())) from error
