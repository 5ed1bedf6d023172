"""Which format of the pretraining data survives training: shares, accuracy and diversity by format (arXiv 2504.07912).

Tables are `[Q, N]`: N completions of each of Q problems.
"""
import re
from collections.abc import Hashable, Sequence

import numpy as np

OTHER = "other"


def format_of(text: str, formats: Sequence[str]) -> str:
    """The name of the first of `formats`, each `"name=regular expression"`, that the whole `text` fits; `"other"` if none.

    Raises ValueError: a format without a name or with an expression that cannot be read.
    """
    for one in formats:
        name, equals, pattern = one.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"cannot read the format {one!r}; write name=regular expression")
        try:
            match = re.fullmatch(pattern, text, re.DOTALL)
        except re.error as error:
            raise ValueError(f"format {name.strip()!r}: {pattern!r} is no regular expression ({error})") from error
        if match:
            return name.strip()
    return OTHER


def shares(formats: np.ndarray, count: int) -> np.ndarray:
    """Share of the completions `formats i[Q, N]` that has each of `count` formats, `f64[count]`."""
    return np.bincount(np.asarray(formats).reshape(-1), minlength=count) / np.size(formats)


def accuracy(correct: np.ndarray, formats: np.ndarray, count: int) -> np.ndarray:
    """Share of right completions of each format, `f64[count]`; NaN for a format that none has."""
    flat = np.asarray(formats).reshape(-1)
    total = np.bincount(flat, minlength=count)
    right = np.bincount(flat, np.asarray(correct, np.float64).reshape(-1), minlength=count)
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def mixture_entropy(shares: np.ndarray) -> float:
    """`-sum p log p` of the shares of formats, nats: 0 once one format is left."""
    present = np.asarray(shares, np.float64)[np.asarray(shares) > 0]
    return float(-(present * np.log(present)).sum()) + 0.0


def distinct_correct(correct: np.ndarray, texts: Sequence[Sequence[Hashable]]) -> list[tuple[int, Hashable]]:
    """`(problem, text)` of right completions, duplicates dropped, in the order of sampling: the data of expert iteration."""
    return list(dict.fromkeys((q, text) for q, row in enumerate(texts) for text, good in zip(row, correct[q]) if good))
