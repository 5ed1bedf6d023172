"""Random batches, and the table of cases that the property tests run over.

Every registered factory is tested with its defaults and with the hyper-parameters of every row of the catalogue that
uses it. A variant that needs more puts a `Case` for its slug into the dicts ESTIMATORS or OBJECTIVES of a file
`cases_<family>.py` beside this one: `{"slug": [Case(...), ...]}`.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import methods
from jaxrl_llm.advantages.base import ESTIMATORS
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.objectives.base import OBJECTIVES

P, G, T, K, D = 4, 5, 6, 3, 7


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One way to call a factory.

    `hyper`: its keywords. `inputs(rng, P, G, T)`: fields of `Rollouts` to set (arrays; `extras` as a dict), where the
    random ones do not do. `equal`, alike: what else is the same when all rewards are, so that every advantage is exactly
    0. `exempt`: name of a property -> the reason why it cannot hold ("equal": why it is not 0 even so).
    """

    hyper: Mapping = dataclasses.field(default_factory=dict)
    inputs: Callable[[np.random.Generator, int, int, int], Mapping] = lambda rng, p, g, t: {}
    equal: Callable[[np.random.Generator, int, int, int], Mapping] = lambda rng, p, g, t: {}
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)


def load(kind: str) -> dict[str, list[Case]]:
    """All cases of `kind` ("ESTIMATORS" or "OBJECTIVES") from the files beside this one."""
    cases: dict[str, list[Case]] = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("cases_*.py")):
        for slug, rows in getattr(importlib.import_module(path.stem), kind, {}).items():
            cases.setdefault(slug, []).extend(rows)
    return cases


def of_the_catalogue(kind: str, slug: str, cases: list[Case]) -> list[Case]:
    """A case for every set of hyper-parameters that rows of the catalogue use for `slug` and that is not in `cases`.

    Its inputs and exemptions are those of the case that shares most hyper-parameters with it; budgets are T tokens.
    """
    part, factories = ("estimator", ESTIMATORS) if kind == "ESTIMATORS" else ("objective", OBJECTIVES)
    keywords = factories.parameters(slug)
    result: list[Case] = []
    for row in methods.METHODS.values():
        name, hyper = row.part(part)
        if name != slug:
            continue
        reduced = hyper.get("aggregation", getattr(keywords.get("aggregation"), "default", "fixed_length"))
        if "max_len" in keywords and reduced == "fixed_length":
            hyper = {"max_len": T, **hyper}
        if "feature_size" in keywords:
            hyper = {"feature_size": D, **hyper}
        if all(dict(case.hyper) != hyper for case in (*cases, *result)):
            nearest = max(cases, key=lambda case: len(case.hyper.items() & hyper.items()))
            result.append(dataclasses.replace(nearest, hyper=hyper))
    return result


def parameters(kind: str, slugs: list[str]):
    """(list of (slug, case), list of ids): one default case for each slug that has none in the table."""
    table = load(kind)
    unknown = set(table) - set(slugs)
    assert not unknown, f"cases for names that do not exist: {unknown}"
    given = {slug: table.get(slug, [Case()]) for slug in slugs}
    rows = [(slug, case) for slug in slugs for case in (*given[slug], *of_the_catalogue(kind, slug, given[slug]))]
    ids = [f"{slug}-{','.join(f'{k}={v}' for k, v in case.hyper.items()) or 'default'}" for slug, case in rows]
    return rows, ids


def further(rows: list) -> list[bool]:
    """Whether a slug has a case before each of its rows."""
    slugs = [slug for slug, _ in rows]
    return [slug in slugs[:place] for place, slug in enumerate(slugs)]


def each(names: str, values: list, rows: list, ids: list[str]):
    """Parametrises a test over `values` of the rows; cases of a slug after its first one are slow: the full suite has them."""
    return pytest.mark.parametrize(names, [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] * later, id=name)
        for value, name, later in zip(values, ids, further(rows))])


def first(names: str, values: list, rows: list, ids: list[str]):
    """Parametrises a test over the first case of every slug, where further hyper-parameters could hardly change its outcome."""
    chosen = [place for place, later in enumerate(further(rows)) if not later]
    return pytest.mark.parametrize(names, [values[place] for place in chosen], ids=[ids[place] for place in chosen])


def batch(seed: int, case: Case, shape: tuple[int, int, int] = (P, G, T), edge: str = "none") -> Rollouts:
    """A random batch: some rollouts invalid, some empty, some with holes in the mask, written by others.

    `edge`: "equal" (all rewards and everything measured alike), "invalid" (no rollout), "empty" (no token).
    """
    rng = np.random.default_rng(seed)
    p, g, t = shape
    mask = np.arange(t) < rng.integers(0, t + 1, (p, g, 1))
    mask &= (rng.random((p, g, 1)) < 0.5) | (rng.random((p, g, t)) < 0.7)
    valid = rng.random((p, g)) < 0.85
    behavior = -np.exp(rng.normal(size=(p, g, t)))
    fields = dict(
        mask=mask,
        valid=valid,
        rewards=rng.choice([0.0, 0.5, 1.0], (p, g)),
        reward_components=rng.choice([0.0, 0.5, 1.0], (p, g, K)),
        tokens=rng.integers(0, 50, (p, g, t)),
        prompt_ids=np.arange(p) + 10,
        behavior_logprobs=behavior,
        old_logprobs=behavior + 0.3 * rng.normal(size=(p, g, t)),
        ref_logprobs=behavior + 0.3 * rng.normal(size=(p, g, t)),
        entropies=rng.gamma(2.0, size=(p, g, t)),
        policy_version=rng.integers(0, 3, (p, g, t)),
        step_ids=np.cumsum(rng.random((p, g, t)) < 0.4, axis=-1),
        features=rng.normal(size=(p, g, D)),
    )
    fields |= case.inputs(rng, p, g, t)
    if edge == "equal":
        fields["rewards"] = np.full((p, g), 0.3)
        fields["reward_components"] = np.full((p, g, K), 0.3)
        alike = case.equal(rng, p, g, t)
        fields |= {**alike, "extras": {**fields.get("extras", {}), **alike.get("extras", {})}}
    elif edge == "invalid":
        fields["valid"] = np.zeros((p, g), bool)
    elif edge == "empty":
        fields["mask"] = np.zeros((p, g, t), bool)
    others = rng.choice([Role.ENVIRONMENT, Role.HINT, Role.EXPERT], (p, g, t))
    there = np.flip(np.cumsum(np.flip(fields["mask"], -1), axis=-1), -1) > 0
    fields["role"] = np.where(fields["mask"], fields.get("role", Role.POLICY), np.where(there, others, Role.PADDING))
    return Rollouts(**jax.tree.map(as_array, fields))


def spoil(tree, trained, seed: int):
    """`tree` with garbage in all that it holds of tokens that are not `trained` bool[P, G, T]; masks and roles stay.

    NaN, infinities and large numbers among floats, numbers that are no ids among integers, any truth values.
    """
    rng = np.random.default_rng(seed)
    choices = {"f": [np.nan, np.inf, -np.inf, -1e30, 1e30], "i": [-7, 10**6, 2**31 - 1], "b": [False, True]}

    def spoiled(path, x):  # a bare array has no path
        if x.shape[:3] != trained.shape or (path and getattr(path[-1], "name", "") in ("mask", "role")):
            return x
        own = np.asarray(trained).reshape(*trained.shape, *[1] * (x.ndim - 3))
        return np.where(own, x, rng.choice(choices[np.dtype(x.dtype).kind], x.shape).astype(x.dtype))

    return jax.tree.map_with_path(spoiled, tree)


def squeeze(tree, trained):
    """`tree` with the tokens of each rollout that are `trained` bool[P, G, T] one after another, holes and padding behind."""
    p, g, t = trained.shape
    order = np.argsort(~np.asarray(trained), axis=-1, kind="stable")

    def moved(x):
        if x.ndim > 2 and x.shape[:3] in ((p, g, t), (p, 1, t)):
            return np.take_along_axis(np.asarray(x), order.reshape(p, g, t, *[1] * (x.ndim - 3)), axis=2)
        return x

    result = jax.tree.map(moved, tree)
    return result.replace(role=result.role * result.mask) if isinstance(result, Rollouts) else result


def as_array(x, floating=None):
    x = np.asarray(x)
    kinds = {"f": floating or jnp.float32, "i": jnp.int32, "u": jnp.uint32, "b": jnp.bool_}
    return jax.device_put(np.asarray(x, kinds[x.dtype.kind]))  # which dispatches less than jnp.asarray


def logprobs(seed: int, shape: tuple[int, int, int] = (P, G, T)) -> jax.Array:
    return as_array(-np.exp(np.random.default_rng(seed + 1).normal(size=shape)))


def advantages(seed: int, shape: tuple[int, int, int] = (P, G, T)) -> jax.Array:
    """One number per rollout on its tokens, both signs."""
    values = np.random.default_rng(seed + 2).normal(size=shape[:2])
    return as_array(np.broadcast_to(values[..., None], shape))


def pad(x, extra: tuple[int, int, int] = (1, 1, 2)):
    """`x` with more prompts, rollouts and tokens: NaN in measurements, 0 or False elsewhere; axes identified by size."""
    x = np.asarray(x)
    widths = [(0, extra[0])]
    if x.ndim > 1:
        widths.append((0, extra[1] if x.shape[1] == G else 0))
    if x.ndim > 2:
        widths.append((0, extra[2] if x.shape[2] == T else 0))
    widths += [(0, 0)] * (x.ndim - len(widths))
    measured = x.dtype.kind == "f" and x.ndim > 1 and x.shape[1] == G
    return jnp.asarray(np.pad(x, widths, constant_values=np.nan if measured else 0))


def permute(x, order_P, order_G):
    """`x` with prompts and, where it has that axis, rollouts in another order."""
    x = np.asarray(x)[order_P]
    return x[:, order_G] if x.ndim > 1 and x.shape[1] == G else x


def double(x):
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def same(actual, expected, rtol=1e-5, atol=1e-6):
    """Asserts that two pytrees agree."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def finite(tree) -> bool:
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))
