"""The catalogue of the field's methods: method name -> composition, paper and vetted defaults.

    estimator, objective = methods.build("grpo", max_len=256)

To add a method, write one `Method(...)` into the `ROWS` of the family's file in this folder (a new file is discovered
automatically). `python -m jaxrl_llm.methods` prints the table, `--write docs/methods.md` renews the page.
"""
import importlib
import pkgutil
from typing import Any

from jaxrl_llm import objectives
from jaxrl_llm.advantages import Estimator
from jaxrl_llm.methods import composition, known_as, page, provision
from jaxrl_llm.methods.base import Method
from jaxrl_llm.objectives import Objective
from jaxrl_llm.tools import registry


def _families() -> dict[str, tuple[Method, ...]]:
    """Family name -> rows, from every module of this folder that has `ROWS`."""
    others = ("__main__", "base", "composition", "known_as", "own_row", "page", "provision", "texts")
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in others)
    families = {name: importlib.import_module(f"{__name__}.{name}").ROWS for name in modules}
    slugs = [row.slug for rows in families.values() for row in rows]
    twice = {slug for slug in slugs if slugs.count(slug) > 1}
    if twice:
        raise ValueError(f"methods listed twice: {', '.join(sorted(twice))}")
    return families


FAMILIES = _families()
METHODS = {row.slug: row for rows in FAMILIES.values() for row in rows}


def names() -> list[str]:
    """All methods of the catalogue, sorted, including methods that no run can provide for yet."""
    return sorted(METHODS)


def get(slug: str) -> Method:
    """The row of `slug`, or your own "module:row"; ValueError that says what a peer's name is here, or the nearest slugs."""
    if ":" in slug:
        return _own(slug)
    if slug not in METHODS:
        near, peers = registry.nearest(slug, METHODS, 5), known_as.answers(slug, METHODS)
        hint = f" {'; '.join(peers)}." if peers else f" Did you mean {near[0]!r}? Near: {', '.join(near)}." if near else ""
        raise ValueError(f"Unknown method {slug!r}.{hint} `python -m jaxrl_llm.methods` lists all {len(METHODS)}")
    return METHODS[slug]


def _own(target: str) -> Method:
    """The `Method` of a module of your own; ValueError if there is none of that name."""
    module, name = registry.imported("method", target)
    rows = [given for given, value in vars(module).items() if isinstance(value, Method)]
    registry.one_of(f"row of {module.__name__}", name, rows)
    return getattr(module, name)


def lacks(method: str | Method) -> tuple[provision.Lack, ...]:
    """The unmet needs of a method, by its name or row, with their possible providers; empty for methods that run."""
    row = method if isinstance(method, Method) else get(method)
    sizes: Any = {"max_len": 1024, "feature_size": 67}
    return tuple(provision.lacks(row, *build(row, **sizes), again=composition.replayed_of(row, **sizes) or ()))


def runnable() -> list[str]:
    """The methods that run by name, sorted."""
    return [slug for slug in names() if not lacks(slug)]


def runnable_elsewhere() -> list[str]:
    """The methods that run by name only in environments, with teachers or on tasks that provide what they read; sorted."""
    there = provision.elsewhere()
    return [slug for slug in names() if lacks(slug) and all(lack.what in there for lack in lacks(slug))]


def build(method: str | Method, *, max_len: int | None = None, feature_size: int | None = None, estimator: str = "",
          objective: str = "") -> tuple[Estimator, Objective]:
    """The estimator and the objective of a method, by its name or its row; the texts change them, see `composition`.

    `max_len` is the generation budget in tokens, `feature_size` the width of `rollouts.features`; each is given to the parts
    that have this keyword.
    """
    sizes = {"max_len": max_len, "feature_size": feature_size}
    of_the_run: Any = {name: value for name, value in sizes.items() if value is not None}
    row = composition.composed(method if isinstance(method, Method) else get(method),
                               {"estimator": estimator, "objective": objective}, of_the_run)
    return composition.estimator_of(row, **of_the_run), objectives.made(row.parts("objective"), **of_the_run)


def markdown() -> str:
    """The catalogue as a Markdown page."""
    return page.markdown(FAMILIES, lacks)
