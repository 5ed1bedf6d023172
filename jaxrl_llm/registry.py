"""Tables of named factories: registration, discovery of a package's files, and errors that suggest the right name."""

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

Factory = Callable[..., Any]


def nearest(given: object, allowed: Iterable[str], count: int, cutoff: float = 0.5) -> list[str]:
    """Up to `count` of the allowed names that are spelled most like the given one, the best first."""
    matches = difflib.get_close_matches(str(given), sorted(allowed), n=count, cutoff=cutoff)
    return sorted(matches, key=lambda name: sorted(name) != sorted(str(given)))  # swapped letters come first


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


def register(table: dict[str, Factory], kind: str, factory: Factory) -> Factory:
    """Enter `factory` into `table` under its own name and check the keywords of every later call.

    All parameters of a factory are keyword-only hyper-parameters. Unknown or missing ones raise ValueError.
    """
    slug = factory.__name__
    parameters = inspect.signature(factory).parameters
    if any(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters.values()):
        raise TypeError(f"{kind} {slug!r}: every parameter must be keyword-only (put a bare * first)")
    if slug in table and table[slug].__module__ != factory.__module__:
        raise ValueError(f"{kind} {slug!r} is defined twice: in {table[slug].__module__} and {factory.__module__}")

    @functools.wraps(factory)
    def checked(**hyper):
        for name in hyper:
            if name not in parameters:
                raise unknown(f"keyword of {kind} {slug!r}", name, parameters)
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in hyper:
                raise ValueError(f"{kind} {slug!r} needs the keyword {name!r}, which has no default")
        return factory(**hyper)

    table[slug] = checked
    return checked


def discover(package: str, path: Iterable[str]) -> None:
    """Import every module of `package` so that each file's factories register themselves."""
    for module in sorted(pkgutil.iter_modules(path), key=lambda info: info.name):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")


def imported(target: str) -> Any:
    """What "module:name" names. Raises ValueError without a colon, ImportError and AttributeError if it is not there."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r} has no colon; write module:name, such as my_module:MyClass")
    return getattr(importlib.import_module(module), name)


def make(table: dict[str, Factory], kind: str, slug: str, hyper: dict[str, Any], made: type | None = None) -> Any:
    """Calls the factory of that name in `table` with `hyper`; with `made`, the result's type, also your own "module:function".

    Raises ValueError with the nearest match for an unknown name or keyword, TypeError if your own function
    returns another type.
    """
    if not made or ":" not in slug:
        if slug not in table:
            raise unknown(kind, slug, table)
        return table[slug](**hyper)
    built = imported(slug)(**hyper)
    if made and not isinstance(built, made):
        raise TypeError(f"{slug} returned a {type(built).__name__}; it must return a {made.__module__}.{made.__qualname__}")
    return built
