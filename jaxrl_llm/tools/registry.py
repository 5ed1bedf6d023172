"""Tables of named parts: their entries, discovery of a package's files, and errors that suggest the right name."""
import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, get_args

from jaxrl_llm.tools import memo, ranges
from jaxrl_llm.tools.ranges import Range

Factory = Callable[..., Any]
TABLES: list["PartTable"] = []  # all tables of the process
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


class Conflict(NamedTuple):
    """What a part cannot be together with, why, and what to do.

    `of` names values of a composition (`setup.values`): fields that some part needs ("needs.answers"), parts
    ("rule"), knobs ("knobs.reset") and keys ("config.lora.rank"). `when(*values)` says whether they are in conflict; None: if
    all of them are there and true. A name that the composition lacks is in no conflict. `why` and `do` may show the values by
    their place, "{0}", the name of the "{method}", and the sort and name of the "{part}" that declares the conflict. Or `why`
    is a function of the values, which returns the reason, or "" where there is no conflict.
    """

    of: tuple[str, ...]
    why: str | Callable[..., str]
    do: str
    when: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a named part before it is made, the entry of every table.

    Attributes:
      make: the factory.
      needs: what it cannot be made or used without: fields of rollouts, and parts of a run such as "config.teacher.path". What
        depends on the numbers of a part is an attribute `needs` of the object that `make` returns; `needs_of` joins both.
      provides: fields, columns or abilities that a run has by it; `provides_of` joins those of the object.
      reads: knobs that it reads.
      takes: arguments of the factory that a run gives to it, as names of values of the run (`setup.values`) by argument.
      conflicts: what it cannot be together with.
      ranges: those of its own numbers, by keyword; names that parts share have theirs in `tools.ranges`.
    """

    make: Factory
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    reads: tuple[Any, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    takes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)

    def needs_of(self, made: Any) -> set[str]:
        """The needs of the part, and those of the object that it made."""
        return {*self.needs, *getattr(made, "needs", ())}

    def provides_of(self, made: Any) -> set[str]:
        """What the part provides, and what the object that it made provides."""
        return {*self.provides, *getattr(made, "provides", ())}


class PartTable(dict[str, Any]):
    """The parts of one sort by name: an entry is a `Kind`, or of the table's own type of kinds.

    Args:
      what: the word for one part in errors.
      made: the type of what its factories return.
      pure: numbers outside the `ranges` of their names are errors, and factories of this package depend on their keywords
        alone: equal ones give the same object again, so that runs of a process share what is compiled with it. Your own
        factories may read what they like, and are called each time.
      keywords: all parameters of a factory are keyword-only numbers, which are checked.
      kind: the type of the entries.
      given: arguments that a run gives to every factory that has them, beside those that an entry `takes`.
      former: for keywords that factories had, what to write instead, with the name of the part as `slug` and the `value`; under
        "part.keyword" for one of the parts alone, under "part.keyword=value" for one of its values.
    """

    def __init__(self, what: str, made: type, *, pure: bool = False, keywords: bool = True, kind: type[Kind] = Kind,
                 former: Mapping[str, str] | None = None, given: Iterable[str] = ()):
        super().__init__()
        self.what, self.made, self.pure, self.keywords, self.kind = what, made, pure, keywords, kind
        self.given = frozenset(given)
        self.former = former or {}
        TABLES.append(self)

    def enter(self, factory: Factory | None = None, /, *, name: str = "", **facts: Any) -> Factory:
        """Enters a factory under `name`, or its own name, with the `facts` of its `Kind`: a decorator, with or without them.

        The keywords of every later call are checked: unknown or missing ones raise ValueError. Raises ValueError if two modules
        define one name, TypeError for a range of a number that the factory does not take.
        """
        if factory is None:
            return functools.partial(self.enter, name=name, **facts)
        slug = name or factory.__name__
        module, there = factory.__module__, module_of(self[slug]) if slug in self else factory.__module__
        if there != module:
            raise ValueError(f"{self.what} {slug!r} is defined twice: in {there} and {module}")
        if strange := {*facts.get("ranges", ())} - {*inspect.signature(factory).parameters}:
            raise TypeError(f"{self.what} {slug!r} has no number {', '.join(sorted(strange))}, of which it gives the range")
        made = self._checked(slug, factory) if self.keywords else factory
        self[slug] = self.kind(made, **facts)
        return made

    def find(self, name: str) -> Kind:
        """The entry of that name, or of your own "module:function"; ValueError with the nearest match if there is none."""
        if ":" not in name:
            return self[one_of(self.what, name, self)]
        function = function_of(self.what, name)
        return next((kind for kind in self.values() if kind.make is function), None) or self.kind(function)

    def make(self, name: str, **hyper: Any) -> Any:
        """What the factory of that name, or your own "module:function", returns for `hyper`.

        Raises ValueError with the nearest match for an unknown name or keyword, and if your own function cannot be found, takes
        no such keywords or returns another type.
        """
        kind = self.find(name)
        return call(self.what, name, kind.make, hyper, self.made) if ":" in name else kind.make(**hyper)

    def parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        """The parameters of the factory of that name; ValueError if there is none."""
        return inspect.signature(self.find(name).make).parameters

    def order(self, name: str) -> list[str]:
        """The names of a part's numbers, without arguments that a run gives, in the order that values without a name take.

        Raises ValueError for an unknown part.
        """
        given = self.given | self.find(name).takes.keys()
        return [parameter for parameter in self.parameters(name) if parameter not in given]

    def check(self, slug: str, keyword: str, value: Any) -> None:
        """Raises ValueError for a number outside its range, a fraction in place of an `int`, and text in place of a number."""
        kind, parameter = self.find(slug), self.parameters(slug)[keyword]
        own = kind.ranges.get(keyword)
        if self.pure or own:
            ranges.check(self.what, slug, keyword, value, parameter.default, own)
        else:
            ranges.check_number(self.what, slug, keyword, value, parameter.default)
        if isinstance(value, float) and not value.is_integer() and _is_whole(parameter):
            raise ValueError(f"{self.what} {slug!r}: {keyword}={value!r}; give a whole number")

    def check_former(self, slug: str, keyword: str, value: Any) -> None:
        """Raises ValueError, which says what to write instead, for a keyword that such parts had."""
        if keyword in self.former:
            ways = (f"{slug}.{keyword}={value!r}", f"{slug}.{keyword}", keyword)
            instead = next(self.former[way] for way in ways if way in self.former).format(slug=slug, value=value)
            raise ValueError(f"{self.what} {slug!r} has no {keyword}: {instead}")

    def _checked(self, slug: str, factory: Factory) -> Factory:
        made = memo.remembered(64)(factory) if self.pure and factory.__module__.startswith("jaxrl_llm.") else factory
        parameters = inspect.signature(factory).parameters
        if any(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters.values()):
            raise TypeError(f"{self.what} {slug!r}: every parameter must be keyword-only (put a bare * first)")

        @functools.wraps(factory)
        def checked(**hyper):
            if found := self.untaken(slug, hyper):
                raise ValueError(found[0] if len(found) == 1 else "; ".join(line.removesuffix(".") for line in found))
            return made(**{key: int(value) if isinstance(value, float) and _is_whole(parameters[key]) else value
                           for key, value in hyper.items()})

        return checked

    def untaken(self, name: str, hyper: Mapping[str, Any]) -> list[str]:
        """A sentence for each number that the factory of that name, or your own "module:function", does not take, or lacks.

        The factory is not called. Raises ValueError if there is none.
        """
        if ":" in name:
            wrong = unbound(self.what, name, function_of(self.what, name), hyper)
            return [wrong] if wrong else []
        parameters = self.parameters(name)
        return self.faults(name, parameters, hyper) + [
            f"{self.what} {name!r} needs the keyword {key!r}, which has no default" for key, parameter in parameters.items()
            if parameter.default is inspect.Parameter.empty and key not in hyper]

    def faults(self, slug: str, allowed: Iterable[str], hyper: Mapping[str, Any]) -> list[str]:
        """A sentence for each number of a part that is not `allowed` or out of its range."""
        allowed, parameters, found = {*allowed}, self.parameters(slug), []
        for key, value in hyper.items():
            try:
                if key not in allowed:
                    self.check_former(slug, key, value)
                    raise unknown(f"keyword of {self.what} {slug!r}", key, allowed)
                if value is not None or not _may_be_none(parameters[key]):
                    self.check(slug, key, value)
            except ValueError as error:
                found.append(str(error))
        return found


def _may_be_none(parameter: inspect.Parameter) -> bool:
    """Whether the annotation has None, as of numbers that switch a part of a formula off."""
    return "None" in _types(parameter)


def _is_whole(parameter: inspect.Parameter) -> bool:
    """Whether the annotation has whole numbers alone."""
    types = _types(parameter)
    return "int" in types and "float" not in types


def _types(parameter: inspect.Parameter) -> set[str]:
    """The names of the types of an annotation such as `int | None`; files may annotate by text."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        return {name.strip() for name in annotation.split("|")}
    return {"None" if one is type(None) else getattr(one, "__name__", "") for one in get_args(annotation) or (annotation,)}


def module_of(kind: Kind) -> str:
    """The module of an entry of a table."""
    return kind.make.__module__


def discover(package: str, path: Iterable[str]) -> None:
    """Imports every module of `package` so that each file's factories register themselves."""
    for module in sorted(pkgutil.iter_modules(path), key=lambda info: info.name):
        if module.name != "__main__":
            importlib.import_module(f"{package}.{module.name}")


def table(what: str, package: str) -> PartTable:
    """The table of parts of this sort, which are in a `package` above the caller: rooms below read what its parts declare."""
    importlib.import_module(package)
    return next(one for one in TABLES if one.what == what)


def own(kind: str, target: str, hyper: dict[str, Any], made: type) -> Any:
    """Calls your own "module:function" with `hyper`.

    Raises ValueError if it cannot be found, takes no such keywords or returns something else than `made`.
    """
    return call(kind, target, function_of(kind, target), hyper, made)


def call(kind: str, target: str, function: Callable[..., Any], hyper: Mapping[str, Any], made: type) -> Any:
    """`function(**hyper)`, named `target`; ValueError if it takes no such keywords or returns something else than `made`."""
    if wrong := unbound(kind, target, function, hyper):
        raise ValueError(wrong)
    built = function(**hyper)
    if not isinstance(built, made):
        raise ValueError(f"{target} returned a {type(built).__name__}; it must return a {made.__module__}.{made.__qualname__}")
    return built


def unbound(kind: str, target: str, function: Callable[..., Any], hyper: Mapping[str, Any]) -> str:
    """What is wrong with these keywords of the function, named `target`; "": it takes them."""
    try:
        inspect.signature(function).bind(**hyper)
    except TypeError as error:
        return f"{kind} {target!r} takes {inspect.signature(function)}: {error}"
    return ""


def split_target(kind: str, target: str) -> tuple[str, str]:
    """Module and function of your own "module:function", whose module enters `NAMED`; ValueError for a text of another form."""
    module, _, function = target.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError(f"{kind} {target!r} names no function; write module:function, for example my_module:my_function")
    NAMED.add(module)
    return module, function


def function_of(kind: str, target: str) -> Callable[..., Any]:
    """Your own function, imported from "module:function"; ValueError if there is no such module or function."""
    module, name = imported(kind, target)
    if not callable(getattr(module, name, None)):
        functions = [given for given, value in vars(module).items()
                     if (inspect.isfunction(value) or inspect.isclass(value)) and not given.startswith("_")]
        raise unknown(f"function of {module.__name__}", name, functions)
    return getattr(module, name)


def imported(kind: str, target: str) -> tuple[ModuleType, str]:
    """The module of "module:name", and the name; ValueError if there is no such module."""
    module, name = split_target(kind, target)
    try:
        return importlib.import_module(module), name
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # the module is there, and lacks something itself
            raise
        raise ValueError(f"{kind} {target!r}: there is no module {error.name!r} on the path; correct its name, or give "
                         "the folder of its file before the command, PYTHONPATH=FOLDER") from error
