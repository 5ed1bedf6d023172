"""The text of a phase, `long(steps=50, sampling.max_tokens=64, fresh='optimizer, reference')`, as values."""
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.methods.texts import SLOTS
from jaxrl_llm.setup.keys import near_keys
from jaxrl_llm.tools import registry, written

# Those that are no keys of the configuration.
WORDS = {"weights": "last", "fresh": "", "patience": 0, "metric": "eval/score", "where": ""}
WEIGHTS = ("last", "first")
FRESH = ("optimizer", "reference")
# Keys of the whole run: its model, its devices and its records.
_WHOLE = ("phases", "model.", "lora.", "mesh.", "checkpoint.", "warmup.", "wandb")


def read(part: str, faults: list[str]) -> tuple[str, dict[str, str]]:
    """The name of a phase, and the texts of its values by key."""
    match = re.fullmatch(r"(\w+)\s*(?:\((.*)\))?", part, re.DOTALL)
    if match is None:
        faults.append(f"cannot read {part!r}; write name, or name(key=value, key=value), for example "
                      "long(steps=50, sampling.max_tokens=64)")
        return "", {}
    texts: dict[str, str] = {}
    for piece in written.parts(match[2] or ""):
        key, _, text = (side.strip() for side in piece.partition("="))
        if not re.fullmatch(r"[\w.]+", key) or not text or key in texts:
            faults.append(f"phase {match[1]!r}: cannot read {piece!r}; write key=value, each key once")
        else:
            texts[key] = text
    return match[1], texts


def there(text: str, known: Mapping[str, Any]) -> str:
    """The phases of a text without those whose key `where` is empty; "" if one phase is left that changes nothing.

    `known`: the values of the whole run, by key. An unknown key leaves its phase in, where `checked` reports it.
    """
    parts = written.parts(text)
    kept = [part for part in parts if known.get(written.unquoted(read(part, [])[1].get("where", "''")), True)]
    if len(kept) == len(parts):
        return text
    return "" if len(kept) == 1 and re.fullmatch(r"\w+", kept[0]) else ", ".join(kept)


def value(key: str, text: str, known: Mapping[str, Any]) -> Any:
    """The value of a key or a word from its text, where the whole run has the `known` values.

    `50%` is this share of the run's own number, whole numbers rounded up. Raises ValueError: keys that do not exist or are of
    the whole run, and texts that cannot be read.
    """
    if key.startswith(_WHOLE):
        raise ValueError(f"{key} is of the whole run, whose weights, devices and records its phases share; set it beside "
                         "config.phases")
    if key not in known and key not in WORDS:
        raise ValueError(f"the configuration has no key {key!r}{near_keys([key])}; the words of a phase beside its keys are "
                         f"{', '.join(WORDS)}")
    share, own = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text), known.get(key)
    if share and isinstance(own, int | float) and not isinstance(own, bool):
        part = float(share[1]) / 100 * own
        return max(math.ceil(part - 1e-4), 1) if isinstance(own, int) else part
    if key == "where" and (named := written.unquoted(text)) not in known:
        raise ValueError(f"where names the key {named!r}, which the configuration lacks{near_keys([named])}")
    if key in SLOTS or key == "where":
        return written.unquoted(text)
    try:
        found = written.literal(text)
    except ValueError:
        raise ValueError(f"cannot read {key}={text}; texts with spaces or signs stand in quotes") from None
    return text if isinstance(own, str) and not isinstance(found, str) else found


def checked(name: str, number: int, changes: Mapping[str, Any], every: int, faults: list[str]) -> dict[str, Any]:
    """The words of a phase with their defaults; `every`: steps between its evaluations."""
    words = {**WORDS, **{word: changes[word] for word in WORDS if word in changes}}
    fresh, patience = written.parts(str(words["fresh"])), words["patience"]
    for what, given, allowed in (("weights", words["weights"], WEIGHTS), *(("fresh", one, FRESH) for one in fresh)):
        if given not in allowed:
            faults.append(f"phase {name!r}: {registry.unknown(what, given, allowed)}")
    if number == 1 and {"weights", "fresh"} & changes.keys():
        faults.append(f"phase {name!r} is the first: no phase before it left weights, and everything begins with it; leave "
                      f"{' and '.join(sorted({'weights', 'fresh'} & changes.keys()))} out of it")
    if "metric" in changes and not patience:
        faults.append(f"phase {name!r}: metric={words['metric']} counts for patience alone; set patience, or leave it out")
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
        faults.append(f"phase {name!r}: patience={patience!r}; give a number of evaluations, or 0: it has all its steps")
    elif patience and not every:
        faults.append(f"phase {name!r}: patience={patience} ends it by its evaluations, and eval.every=0 leaves out "
                      "all but the last; set eval.every")
    return {"weights": words["weights"], "fresh": frozenset(fresh), "patience": patience, "metric": words["metric"]}


def steps(total: int, names: Sequence[str], given: Sequence[int | None], faults: list[str]) -> list[int]:
    """The steps of each phase, `total` together: phases without a number share what is left, the last of them the remainder."""
    known, left = sum(count or 0 for count in given), [place for place, count in enumerate(given) if count is None]
    rest = total - known
    few = [f"phase {name!r}: steps={count}; give 1 or more" for name, count in zip(names, given, strict=True)
           if count is not None and count < 1]
    faults += few
    if not left and rest and not few:
        faults.append(f"the phases have {known} steps together, and config.steps is {total}; set config.steps={known}, or "
                      "leave the steps out of a phase, which then has the rest")
    if rest < len(left):
        faults.append(f"config.steps={total} leaves {max(rest, 0)} for the phases without a number of steps, "
                      f"{', '.join(names[place] for place in left)}; each needs one or more")
    each = rest // max(len(left), 1)
    return [(each + rest % len(left) * (place == left[-1])) if count is None else count for place, count in enumerate(given)]
