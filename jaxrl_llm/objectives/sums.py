"""An objective as a sum of parts, `ppo_clip(clip_high=0.28) + kl(0.01)`; their numbers may follow schedules."""
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.objectives.base import OBJECTIVES, OWN_KL, Objective
from jaxrl_llm.objectives.scheduled import scheduled
from jaxrl_llm.objectives.schedules import is_schedule, schedule
from jaxrl_llm.objectives.terms.base import TERMS, Term, composed
from jaxrl_llm.tools import written

Part = tuple[str, dict[str, Any]]  # a name and its numbers
# Rows of REC with the regulariser that they had as a word of their objective.
_REC = dict.fromkeys(("rec_family", "rec_ring", "red_drop", "red_weight"), "none") | {"rec_opmd": "k2"}


def of(text: str, **given: Any) -> Objective:
    """The objective of a text such as `"cispo(max_ratio=4) + kl(0.01) + entropy(after(0.001, 50))"`; `given` as for `made`."""
    def order(name: str) -> list[str]:
        return (TERMS if name in TERMS else OBJECTIVES).order(name)

    return made([written.call(part, order) for part in written.parts(text, "+")], **given)


def made(parts: Sequence[Part], *, steps: int | None = None, per_step: int = 1, **of_the_run: Any) -> Objective:
    """The sum of these parts, an objective and its terms.

    A number may be a schedule as text, see `objectives.schedules`, over `steps`, each of `per_step` updates. Its metric is
    `objective/NAME`, or `objective/TERM_coef` for the coefficient of a term. `of_the_run`: numbers such as `max_len`, for an
    objective that has them and does not set them itself. Raises ValueError: as parts and schedules do, for a term in the place
    of the objective, or two objectives.
    """
    if found := [line for place, (name, _) in enumerate(parts) if (line := misplaced(place, name))]:
        raise ValueError("; ".join(found))
    (name, numbers), *added = parts
    own = OBJECTIVES.parameters(name)
    numbers = {key: value for key, value in of_the_run.items() if value is not None and key in own} | numbers
    timed = {key: schedule(value, steps) for key, value in numbers.items() if is_schedule(value)}
    places = {key: (0, key) for key in timed}
    for place, (term, given) in enumerate(added, 1):
        by_schedule = [key for key, value in given.items() if is_schedule(value)]
        for key in by_schedule:
            metric = f"{_term(term, given, dict.fromkeys(by_schedule, 1.0)).name}_{key}"
            timed[metric], places[metric] = schedule(given[key], steps), (place, key)

    def whole(**now: Any) -> Objective:
        at: list[dict[str, Any]] = [{} for _ in parts]
        for metric, value in now.items():
            place, key = places[metric]
            at[place][key] = value
        terms = tuple(_term(term, given, more) for (term, given), more in zip(added, at[1:], strict=True))
        return composed(OBJECTIVES.make(name, **numbers | at[0]), terms)

    return scheduled(whole, timed, per_step) if timed else whole()


def renewed(method: str, text: str) -> str:
    """A text that changes numbers of an objective, of a release in which divergences and bonuses were numbers, with terms."""
    if not any(f"{former}=" in text for former in ("kl_coef", "entropy_coef", "regulariser")):
        return text
    numbers = written.keywords(text)
    terms = _regularised(method, numbers) if method in _REC else []
    if "kl_coef" in numbers and method in OWN_KL:
        numbers[OWN_KL[method]] = numbers.pop("kl_coef")
    if "kl_coef" in numbers:
        estimator = numbers.pop("kl_estimator", "k3")
        estimator = "unbiased" if numbers.pop("kl_ratio", False) else estimator
        terms.append(f"kl({numbers.pop('kl_coef')}{f', estimator={estimator}' * (estimator != 'k3')})")
    if "entropy_coef" in numbers:
        terms.append(f"entropy({numbers.pop('entropy_coef')})")
    base = written.written("", numbers)[1:-1]
    return " + ".join([base, *terms]).strip()


def _regularised(method: str, numbers: dict[str, Any]) -> list[str]:
    """The terms of the regulariser of a row of REC, whose words leave the `numbers`, unless its coefficient has a schedule."""
    if is_schedule(numbers.get("kl_coef")):
        return []
    before, coef = _REC[method], numbers.pop("kl_coef", 0.1)
    now = numbers.pop("regulariser", before)
    terms = [f"nll({coef}, on=all)"] * (now == "forward_kl")
    return terms + [f"kl({2 * coef if now == 'k2' else 0.0}, estimator=k2, against=old)"] * ("k2" in (before, now))


def name_of(term: str, numbers: dict[str, Any]) -> str:
    """The name that a term with these numbers has in a loss, `kl` or `kl_old`; that of its factory if it cannot be made."""
    try:
        return _term(term, numbers, {key: 1.0 for key, value in numbers.items() if is_schedule(value)}).name
    except ValueError:
        return term


def misplaced(place: int, name: str) -> str:
    """What is wrong with a name at this place of a sum, from 0: a term before an objective, or a second objective; "": nothing.
    """
    if not place and name in TERMS:
        return f"a loss begins with an objective, and {name!r} is a term; write for example ppo_clip + {name}(...)"
    if place and name in OBJECTIVES:
        return f"{name!r} is a second objective: a loss has one, and terms behind it, which are {', '.join(sorted(TERMS))}"
    return ""


def _term(name: str, given: dict[str, Any], now: dict[str, Any]) -> Term:
    return TERMS.make(name, **given | now)
