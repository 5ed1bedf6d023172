"""Keys of a configuration by their dotted names: to set one, and the ones that resemble an unknown name."""
import difflib
from collections.abc import Iterable
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from jaxrl_llm.setup.config import default_config
from jaxrl_llm.tools.registry import nearest

FORMER = {"learner.balance": "it is a term, --config.objective=\"+ balance(0.01)\""}  # keys that there were


def flat(config: ConfigDict) -> dict[str, Any]:
    """The values of a configuration by their dotted names."""
    return flatten_dict(config.to_dict(), sep=".")


def check_values(config: ConfigDict) -> None:
    """Raises ValueError that lists the keys whose value is None, which a ConfigDict accepts for every key and no key has."""
    given = flat(config)
    if missing := [f"config.{key} is None; give a value such as its default, {value!r}"
                   for key, value in flat(default_config()).items() if given.get(key, value) is None]:
        raise ValueError("\n  ".join(missing))


def set_key(config: ConfigDict, key: str, value: Any) -> None:
    """Sets the value of a dotted key; ValueError names a key that does not exist, or a value of another type."""
    known = flat(config)
    if key not in known:
        raise ValueError(f"the configuration has no key {key!r}{near_keys([key])}; --help lists all")
    try:
        if isinstance(value, bool) and not isinstance(known[key], bool):
            raise TypeError("a truth value is no number")
        config.update_from_flattened_dict({key: value})
    except (TypeError, ValueError) as error:
        kind = type(known[key]).__name__
        raise ValueError(f"config.{key}={value!r}: it is {known[key]!r} here, of type {kind}") from error


def near_keys(names: Iterable[str], prefix: str = "") -> str:
    """The end of a message about keys that a configuration lacks: what is in their place, or resembles them, with a prefix."""
    names = list(names)
    if any(name in FORMER for name in names):
        return "".join(f"; {FORMER[name]}" for name in names if name in FORMER)
    near = [prefix + key for name in names for key in nearest_keys(name)]
    return f"; near: {', '.join(near)}" if near else ""


def nearest_keys(name: str) -> list[str]:
    """Up to three keys of a configuration that resemble an unknown `name`: by initials (lr), by last part, by spelling."""
    keys, last = list(flat(default_config())), name.rpartition(".")[2]
    if name in keys:
        return []
    ends = {key: key.rpartition(".")[2] for key in keys}
    matches = [key for key, end in ends.items() if last in (end, "".join(word[0] for word in end.split("_")))]
    matches += [key for end in nearest(last, ends.values(), 3, cutoff=0.6) for key in keys if ends[key] == end]
    if "." in name:  # it names the section
        matches.sort(key=lambda key: -difflib.SequenceMatcher(None, name, key).ratio())
    return list(dict.fromkeys([*matches, *nearest(name, keys, 3, cutoff=0.7)]))[:3]
