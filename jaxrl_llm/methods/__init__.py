"""The catalogue of the field's methods: method name -> composition, paper and vetted defaults.

    estimator, objective = methods.build("grpo", max_len=256)

To add a method, write one `Method(...)` into the `ROWS` of the family's file in this folder (a new file is discovered
automatically). `python -m jaxrl_llm.methods` prints the table, `--write docs/methods.md` renews the page.
"""
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages import Estimator
from jaxrl_llm.methods import page, provision, texts
from jaxrl_llm.methods.base import Method
from jaxrl_llm.objectives import Objective
from jaxrl_llm.tools import registry


def _families() -> dict[str, tuple[Method, ...]]:
    """Family name -> rows, from every module of this folder that has `ROWS`."""
    others = ("__main__", "base", "page", "provision", "texts")
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
    """The row of `slug`; ValueError that names the nearest slugs if there is none."""
    if slug not in METHODS:
        near = registry.nearest(slug, METHODS, 5)
        hint = f" Did you mean {near[0]!r}? Near: {', '.join(near)}." if near else ""
        raise ValueError(f"Unknown method {slug!r}.{hint} `python -m jaxrl_llm.methods` lists all {len(METHODS)}")
    return METHODS[slug]


@functools.cache
def lacks(slug: str) -> tuple[provision.Lack, ...]:
    """The unmet needs of a method, with their possible providers; empty for methods that run."""
    sizes: Any = {"max_len": 1024, "feature_size": 67}
    return tuple(provision.lacks(get(slug), *build(slug, **sizes), again=build_replay(slug, **sizes) or ()))


def runnable() -> list[str]:
    """The methods that run by name, sorted."""
    return [slug for slug in names() if not lacks(slug)]


def runnable_elsewhere() -> list[str]:
    """The methods that run by name only in environments, with teachers or on tasks that provide what they read; sorted."""
    there = provision.elsewhere()
    return [slug for slug in names() if lacks(slug) and all(lack.what in there for lack in lacks(slug))]


def build(slug: str, *, max_len: int | None = None, feature_size: int | None = None, estimator: Mapping[str, Any] | None = None,
          objective: Mapping[str, Any] | None = None) -> tuple[Estimator, Objective]:
    """The estimator and the objective of a method; the two mappings override its hyper-parameters.

    `max_len` is the generation budget in tokens, `feature_size` the width of `rollouts.features`; each is given to the parts
    that have this keyword.
    """
    own = {"max_len": max_len, "feature_size": feature_size}
    return _made(get(slug), "estimator", own, estimator), _made(get(slug), "objective", own, objective)



def build_replay(slug: str, *, max_len: int | None = None, feature_size: int | None = None,
                 estimator: Mapping[str, Any] | None = None, objective: Mapping[str, Any] | None = None
                 ) -> tuple[Estimator, Objective] | None:
    """As `build`, for rollouts that are replayed in updates of their own; None if these are learned from as fresh ones."""
    method, own = get(slug), {"max_len": max_len, "feature_size": feature_size}
    if not method.replay_objective:
        return None
    credit = "replay_estimator" if method.replay_estimator else "estimator"
    return _made(method, credit, own, estimator), _made(method, "replay_objective", own, objective)


def _made(method: Method, key: str, of_the_run: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Any:
    """The estimator or objective that the row names under `key`, with numbers that override its own."""
    named = method.part(key)
    assert named is not None
    table, hyper = texts.SLOTS[key].table, {**named.numbers, **(overrides or {})}
    for keyword, value in of_the_run.items():
        if value is not None and named.name in table and keyword in table.parameters(named.name):
            hyper.setdefault(keyword, value)
    return (advantages if table is advantages.base.ESTIMATORS else objectives).make(named.name, **hyper)


def markdown() -> str:
    """The catalogue as a Markdown page."""
    return page.markdown(FAMILIES, lacks)
