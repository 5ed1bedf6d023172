"""Tables of named factories: registration, discovery of a package's files, and errors that suggest the right name."""
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.tools import memo, ranges

Factory = Callable[..., Any]
NAMED: set[str] = set()  # modules of functions that were given as "module:function", see store.own_code


def nearest(given: object, allowed: Iterable[str], count: int, cutoff: float = 0.5) -> list[str]:
    """Up to `count` of the allowed names that are spelled most like the given one, the best first."""
    matches = difflib.get_close_matches(str(given), sorted(allowed), n=count + 3, cutoff=cutoff)
    return sorted(matches, key=lambda name: sorted(name) != sorted(str(given)))[:count]  # swapped letters come first


def unknown(what: str, given: object, allowed: Iterable[str]) -> ValueError:
    """The error for a name that does not exist: the given name, the nearest match, and all allowed names."""
    allowed = sorted(allowed)
    near = nearest(given, allowed, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"Unknown {what} {given!r}.{hint} Allowed: {', '.join(allowed) or 'none'}.")


def one_of(what: str, given: str, allowed: Iterable[str]) -> str:
    """`given`, if it is one of `allowed`; otherwise ValueError."""
    allowed = tuple(allowed)
    if given not in allowed:
        raise unknown(what, given, allowed)
    return given


def register(table: dict[str, Factory], kind: str, factory: Factory, *, pure: bool = False, name: str = "",
             former: Mapping[str, str] = {}) -> Factory:
    """Enters `factory` into `table` under `name`, or the name of the function, and checks the keywords of every later call.

    All parameters of a factory are keyword-only hyper-parameters. Unknown or missing ones raise ValueError. With `pure`, so do
    numbers outside the `ranges` of their names, and factories of this package depend on their keywords alone: equal ones give
    the same object again, so that runs of a process share what is compiled with it. Your own factories may read what they like,
    and are called each time. `former`: for keywords that such factories had, what to write instead, with the name of the part
    as `slug` and the keyword's `value`.
    """
    slug = name or factory.__name__
    made = memo.remembered(64)(factory) if pure and factory.__module__.startswith("jaxrl_llm.") else factory
    parameters = inspect.signature(factory).parameters
    if any(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters.values()):
        raise TypeError(f"{kind} {slug!r}: every parameter must be keyword-only (put a bare * first)")

    @functools.wraps(factory)
    def checked(**hyper):
        for key in hyper:
            if key in former and key not in parameters:
                raise ValueError(f"{kind} {slug!r} has no {key}: {former[key].format(slug=slug, value=hyper[key])}")
            if key not in parameters:
                raise unknown(f"keyword of {kind} {slug!r}", key, parameters)
            if pure:
                ranges.check(kind, slug, key, hyper[key], parameters[key].default)
        for key, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and key not in hyper:
                raise ValueError(f"{kind} {slug!r} needs the keyword {key!r}, which has no default")
        return made(**hyper)

    enter(table, kind, slug, checked)
    return checked


def enter(table: dict[str, Any], kind: str, slug: str, entry: Any) -> None:
    """Enters a factory, or what is known of one with the factory as its `make`; ValueError if two modules define one name."""
    module, there = module_of(entry), module_of(table.get(slug, entry))
    if there != module:
        raise ValueError(f"{kind} {slug!r} is defined twice: in {there} and {module}")
    table[slug] = entry


def module_of(entry: Any) -> str:
    """The module of an entry of a table."""
    return getattr(entry, "make", entry).__module__


def discover(package: str, path: Iterable[str]) -> None:
    """Imports every module of `package` so that each file's factories register themselves."""
    for module in sorted(pkgutil.iter_modules(path), key=lambda info: info.name):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")


def make(table: dict[str, Factory], kind: str, slug: str, hyper: dict[str, Any], made: type | None = None) -> Any:
    """Calls the factory of that name in `table` with `hyper`; with `made`, the result's type, also your own "module:function".

    Raises ValueError with the nearest match for an unknown name or keyword, and if your own function cannot be found, takes no
    such keywords or returns another type.
    """
    if made and ":" in slug:
        return own(kind, slug, hyper, made)
    if slug not in table:
        raise unknown(kind, slug, table)
    return table[slug](**hyper)


def own(kind: str, target: str, hyper: dict[str, Any], made: type) -> Any:
    """Calls your own "module:function" with `hyper`.

    Raises ValueError if it cannot be found, takes no such keywords or returns something else than `made`.
    """
    return call(kind, target, function_of(kind, target), hyper, made)


def call(kind: str, target: str, function: Callable[..., Any], hyper: Mapping[str, Any], made: type) -> Any:
    """`function(**hyper)`, named `target`; ValueError if it takes no such keywords or returns something else than `made`."""
    try:
        inspect.signature(function).bind(**hyper)
    except TypeError as error:
        raise ValueError(f"{kind} {target!r} takes {inspect.signature(function)}: {error}") from error
    built = function(**hyper)
    if not isinstance(built, made):
        raise ValueError(f"{target} returned a {type(built).__name__}; it must return a {made.__module__}.{made.__qualname__}")
    return built


def split_target(kind: str, target: str) -> tuple[str, str]:
    """Module and function of your own "module:function", whose module enters `NAMED`; ValueError for a text of another form."""
    module, _, function = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(f"{kind} {target!r} names no function; write module:function, for example my_module:my_function")
    NAMED.add(module)
    return module, function


def function_of(kind: str, target: str) -> Callable[..., Any]:
    """Your own function, imported from "module:function"; ValueError if there is no such module or function."""
    module, name = split_target(kind, target)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module is there, and lacks something itself
            raise
        raise ValueError(f"{kind} {target!r}: there is no module {error.name!r} on the path; correct its name, or give "
                         "the folder of its file before the command, PYTHONPATH=FOLDER") from error
    if not callable(getattr(found, name, None)):
        functions = [given for given, value in vars(found).items()
                     if (inspect.isfunction(value) or inspect.isclass(value)) and not given.startswith("_")]
        raise unknown(f"function of {module}", name, functions)
    return getattr(found, name)
