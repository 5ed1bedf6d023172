"""Rows that texts change: `estimator=rloo`, `objective="cispo(max_ratio=4) + kl(0.01)"`, `controllers="every=50"`."""
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages import Estimator
from jaxrl_llm.methods.base import Method
from jaxrl_llm.methods.texts import SLOTS, Named, Slot, faults, head, joined
from jaxrl_llm.objectives import Objective, sums
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import unknown

NONE = "none"  # the text that leaves out the parts of a row
ALWAYS = ("estimator", "objective")  # every method has these
LETTERS = {"estimator": "A", "objective": "loss"}  # of the formula


def composed(row: Method, given: Mapping[str, str], of_the_run: Mapping[str, Any] = {}, where: str = "",
             known: Sequence[str] = ()) -> Method:
    """The row whose texts `given` changes by key, see `overridden`; the numbers of its parts are in their ranges.

    `of_the_run`: `max_len` and `feature_size` for parts that have them. `where`: what stands before a key in errors.
    `known`: faults that are already known. Raises ValueError that lists every fault: a text that cannot be read, an unknown
    name, a number out of its range.
    """
    changed: dict[str, Any] = {}
    found = [*known]
    for key in SLOTS:
        text = given.get(key, "")
        try:
            changed[key] = overridden(row, key, text)
        except ValueError as error:
            found.append(f"{where}{key}={text!r}: {error}")
            if terms := written.parts(text, "+")[1:] if SLOTS[key].sign == "+" else []:
                whole = " + ".join([str(row.part(key) or row.part("objective")), *terms])
                found += [f"{where}{key}={text!r}: {line}" for line in faults(key, whole, of_the_run)]
            continue
        place = f"{where}{key}={text!r}" if text else f"method {row.slug!r} has {key}={changed[key]!r}"
        found += [f"{place}: {line}" for line in faults(key, changed[key], of_the_run)]
    if found:
        raise Faults(found)
    return dataclasses.replace(row, **changed)


class Faults(ValueError):
    """The error of faults of a composition, which are its `lines`."""

    def __init__(self, lines: Sequence[str]):
        self.lines = [*lines]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} faults of the composition:", *lines]))

    def __reduce__(self):
        return Faults, (self.lines,)


def overridden(row: Method, key: str, given: str) -> str:
    """The text of a row under `key`, changed by the text `given`.

    Empty: as the row has it. `none`: no part. Numbers alone, `rate=0.1, every=50`: numbers of the row's parts. Names, `rloo`:
    these parts in place of the row's. In a sum, `+ kl(0.01)` adds a term, or replaces the row's of this name (`kl_old` of
    `kl(0.01, against=old)` is another name), and
    `clip_high=0.3 + kl(0.01)` changes numbers of the first part too. Raises ValueError: a text that cannot be read, `none` for
    what every method has, and numbers that no part has, or several have.
    """
    given = given.strip()
    if given == NONE and key in ALWAYS:
        raise ValueError(f"every method has an {key}; name one, or leave it empty for the method's own")
    if given in ("", NONE):
        return "" if given else getattr(row, key)
    if SLOTS[key].sign != "+":
        return joined(key, _renumbered(row, key, row.parts(key), given)) if are_numbers(given) else given
    first, *rest = [*[""] * given.startswith("+"), *written.parts(given, "+")]
    if not (first or rest):
        raise ValueError(f"{given!r} names no term")
    if first and not are_numbers(first):
        return given
    names = {_name_of(SLOTS[key], text) for text in rest}
    base, added = _renumbered(row, key, row.parts(key)[:1], first), row.parts(key)[1:]
    kept = [*base, *(term for term in added if sums.name_of(*term) not in names)]
    return " + ".join([joined(key, kept), *rest])


def with_one_of_a_kind(row: Method, given: str) -> str:
    """A text that changes an objective, of a release in which every divergence had the name `kl` and replaced the row's."""
    rest = written.parts(given, "+")[0 if given.lstrip().startswith("+") else 1:]
    heads, names = {head(text) for text in rest}, {_name_of(SLOTS["objective"], text) for text in rest}
    if not any(term.name in heads and sums.name_of(*term) not in names for term in row.parts("objective")[1:]):
        return given
    base, *terms = written.parts(overridden(row, "objective", given), "+")
    return " + ".join([base, *(text for text in terms if head(text) not in heads or text in rest)])


def _name_of(slot: Slot, text: str) -> str:
    """The name of the term that a text writes, see `sums.name_of`; the word at its beginning if it cannot be read."""
    try:
        return sums.name_of(*slot.read(text, slot.tables(2)[1]))
    except ValueError:
        return head(text)


def are_numbers(text: str) -> bool:
    """Whether a text has numbers alone, `name=value, name=value`, and names no part."""
    return re.match(r"\s*[^\W\d]\w*\s*=", text) is not None


def _renumbered(row: Method, key: str, named: Sequence[Named], given: str) -> list[Named]:
    """The parts with the numbers `given`, each of which one of them has."""
    table, numbers = SLOTS[key].table, written.keywords(given)
    if not named:
        raise ValueError(f"these are numbers or terms, and method {row.slug!r} has no {table.what} here; name one of "
                         f"{', '.join(sorted(table))}")
    known, found = {part.name: [*table.parameters(part.name)] for part in named}, []
    for keyword in numbers:
        owners = [name for name, keywords in known.items() if keyword in keywords]
        try:
            for name in known if not owners else ():
                table.check_former(name, keyword, numbers[keyword])
            if not owners:
                raise unknown(f"keyword of {table.what} {' or '.join(map(repr, known))}", keyword, {*sum(known.values(), [])})
        except ValueError as error:
            found.append(str(error))
        if len(owners) > 1:
            found.append(f"{keyword} is a number of {' and '.join(owners)}; name the {key} with their numbers in brackets: "
                         f"{joined(key, named)}")
    if found:
        raise ValueError("; ".join(found))
    return [Named(name, old | {key: value for key, value in numbers.items() if key in known[name]}) for name, old in named]


def estimator_of(row: Method, *, key: str = "estimator", **of_the_run: Any) -> Estimator:
    """The estimator of a row; it gets the values `of_the_run`, `max_len` and `feature_size`, whose keywords it has."""
    [(name, numbers)] = row.parts(key)
    return advantages.make(name, **{**_given(key, name, of_the_run), **numbers})


def replayed_of(row: Method, **of_the_run: Any) -> tuple[Estimator, Objective] | None:
    """Estimator and objective of rollouts that are replayed in updates of their own; None: as of fresh ones."""
    credit, loss = row.parts("replay_estimator"), row.parts("replay_objective")
    if not (credit or loss):
        return None
    estimator = estimator_of(row, key="replay_estimator" if credit else "estimator", **of_the_run)
    return estimator, objectives.made(loss or row.parts("objective"), **of_the_run)


def _given(key: str, name: str, of_the_run: Mapping[str, Any]) -> dict[str, Any]:
    known = SLOTS[key].table.parameters(name)
    return {keyword: value for keyword, value in of_the_run.items() if keyword in known}


def number_of(row: Method, key: str, name: str) -> Any:
    """A number of the first part under `key`, as the row has it or by its default; None if it has no such number."""
    [(part, numbers), *_] = row.parts(key)
    parameter = SLOTS[key].table.parameters(part).get(name)
    return numbers.get(name, None if parameter is None else parameter.default)


def formula(row: Method) -> str:
    """The parts of a row in one line, `A = grpo; loss = ppo_clip + kl(0.001); filters = dynamic_sampling`."""
    texts = {LETTERS.get(key, key): getattr(row, key) for key in SLOTS}
    return "; ".join(f"{name} = {text}" for name, text in texts.items() if text)
