"""Ranges of the numbers of estimators, objectives and controllers, by the names that these share."""
import math
from numbers import Real
from typing import Any, NamedTuple


class Range(NamedTuple):
    """From `low` to `high`; `low` itself only if `closed`."""

    low: float
    high: float = math.inf
    closed: bool = True
    finite: bool = True

    def has(self, value: float) -> bool:
        inside = self.low <= value <= self.high if self.closed else self.low < value <= self.high
        return inside and (math.isfinite(value) or not self.finite)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        text = f"{self.low:g} or more" if self.closed else f"more than {self.low:g}"
        return text + (f" and at most {self.high:g}" if self.high < math.inf else ", finite" if self.finite else "")


_ANY, _POSITIVE, _SHARE, _LEAST_0 = Range(-math.inf), Range(0, closed=False), Range(0, 1), Range(0)
_BOUND = Range(0, finite=False)
RANGES = {  # an infinite bound is one that is never reached
    "eps": _LEAST_0, "whiten_eps": _LEAST_0, "kl_coef": _LEAST_0, "reward_kl_coef": _LEAST_0, "held_coef": _LEAST_0,
    "anchor_coef": _LEAST_0, ("term", "coef"): _ANY, ("kl", "coef"): _LEAST_0, ("balance", "coef"): _LEAST_0,
    "clip_low": _BOUND, "clip_high": _BOUND, "min_ratio": _BOUND,
    "max_ratio": Range(0, closed=False, finite=False), "cap": Range(0, closed=False, finite=False), "tau": _POSITIVE,
    "temperature": _POSITIVE, "fraction": _SHARE, "share": _SHARE, "label_smoothing": _SHARE, "gamma_penalty": _SHARE,
    "lambda_policy": _SHARE, "lambda_critic": _SHARE, "ema_decay": _SHARE, ("estimator", "gamma"): _SHARE,
    ("objective", "beta"): _POSITIVE}


def check(kind: str, slug: str, name: str, value: Any, default: Any) -> None:
    """Raises ValueError for a number outside the range of its name, for NaN, and for text in the place of a number.

    Arrays, as of numbers that follow a schedule, pass, and None where it is the default.
    """
    check_number(kind, slug, name, value, default)
    if not isinstance(value, Real) or isinstance(value, bool):
        return
    allowed = RANGES.get((slug, name)) or RANGES.get((kind, name), RANGES.get(name, _ANY if name.endswith("_coef") else None))
    if math.isnan(value) or allowed is not None and not allowed.has(float(value)):
        raise _refused(kind, slug, name, value, allowed or "a number")


def check_number(kind: str, slug: str, name: str, value: Any, default: Any) -> None:
    """Raises ValueError for text, a truth value or None in the place of a number, which the default or its name tells."""
    numeric = isinstance(default, Real) and not isinstance(default, bool)
    if isinstance(value, str | bool | None) and (numeric or name == "coef"):
        raise _refused(kind, slug, name, value, f"a number, for example {default if numeric else 0.01!r}")


def _refused(kind: str, slug: str, name: str, value: Any, allowed: object) -> ValueError:
    return ValueError(f"{kind} {slug!r}: {name}={value!r}; give {allowed}")
