"""Ranges of the numbers of estimators, objectives and controllers: by the names that these share, and those of a part alone."""
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


POSITIVE, SHARE, NOT_NEGATIVE = Range(0, closed=False), Range(0, 1), Range(0)
BOUND = Range(0, finite=False)  # infinity is a bound that is never reached
_ANY = Range(-math.inf)
RANGES = {
    "eps": NOT_NEGATIVE, "whiten_eps": NOT_NEGATIVE, "kl_coef": NOT_NEGATIVE, "reward_kl_coef": NOT_NEGATIVE,
    "held_coef": NOT_NEGATIVE, "anchor_coef": NOT_NEGATIVE, ("term", "coef"): _ANY,
    "clip_low": BOUND, "clip_high": BOUND, "min_ratio": BOUND,
    "max_ratio": Range(0, closed=False, finite=False), "cap": Range(0, closed=False, finite=False), "tau": POSITIVE,
    "temperature": POSITIVE, "fraction": SHARE, "share": SHARE, "label_smoothing": SHARE, "gamma_penalty": SHARE,
    "lambda_policy": SHARE, "lambda_critic": SHARE, "ema_decay": SHARE, ("estimator", "gamma"): SHARE,
    ("objective", "beta"): POSITIVE}


def check(kind: str, slug: str, name: str, value: Any, default: Any, own: Range | None = None) -> None:
    """Raises ValueError for a number outside its `own` range or that of its name, for NaN, and for text in place of a number.

    Arrays, as of numbers that follow a schedule, pass, and None where it is the default.
    """
    check_number(kind, slug, name, value, default)
    if not isinstance(value, Real) or isinstance(value, bool):
        return
    allowed = own or RANGES.get((kind, name), RANGES.get(name, _ANY if name.endswith("_coef") else None))
    if math.isnan(value) or allowed is not None and not allowed.has(float(value)):
        raise _refused(kind, slug, name, value, allowed or "a number")


def check_number(kind: str, slug: str, name: str, value: Any, default: Any) -> None:
    """Raises ValueError for text, a truth value or None in the place of a number, which the default or its name tells."""
    numeric = isinstance(default, Real) and not isinstance(default, bool)
    if isinstance(value, str | bool | None) and (numeric or name == "coef"):
        raise _refused(kind, slug, name, value, f"a number, for example {default if numeric else 0.01!r}")


def _refused(kind: str, slug: str, name: str, value: Any, allowed: object) -> ValueError:
    return ValueError(f"{kind} {slug!r}: {name}={value!r}; give {allowed}")
