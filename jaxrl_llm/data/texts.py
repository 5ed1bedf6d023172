"""Texts that the policy did not write, as tokens: rows of supervised fine-tuning, pairs of preferences, traces of experts."""
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """One text as tokens.

    Attributes:
      ids: i32[N], all tokens: of the prompt, and what follows it.
      trained: bool[N], tokens that count in the loss; those of the prompt do not. Behind the prompt, tokens that are not
        trained are those of tools, users and templates.
      prompt: the number of tokens of the prompt, at least 1, since the first token of a row is never predicted.
      weight: of each trained token in the loss.
      writer: the name of who wrote the trained tokens; "": unknown.
      logprobs: f32[N], log-probs (nats) of the tokens under their writer as it wrote them, NaN where unknown; None: all
        unknown.
      place: where the text was read, such as a file and a line.
    """

    ids: np.ndarray
    trained: np.ndarray
    prompt: int
    weight: float = 1.0
    writer: str = ""
    logprobs: np.ndarray | None = None
    place: str = ""

    def __post_init__(self):
        """Raises ValueError for masks or log-probs of another length, and for a prompt that is empty or trained."""
        where = f"{self.place}: " if self.place else ""
        for name in ("trained", "logprobs"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.ids):
                raise ValueError(f"{where}{name!r} has {len(given)} entries for a text of {len(self.ids)} tokens; give an "
                                 "entry for each token")
        if not 1 <= self.prompt <= len(self.ids) or self.trained[:self.prompt].any():
            raise ValueError(f"{where}prompt={self.prompt} of a text of {len(self.ids)} tokens, the first trained one is token "
                             f"{int(np.argmax(self.trained))}; give a prompt of at least 1 token that ends before it")


class Pair(NamedTuple):
    """Two texts behind one prompt, of which one is preferred."""

    chosen: Text
    rejected: Text


def fitting(texts: Sequence[Text], longest: int) -> tuple[list[Text], Counter]:
    """The texts of at most `longest` tokens with a trained one, and how many were left out, by reason.

    Texts are never cut: their ends would be wrong to imitate.
    """
    kept, out = [], Counter()
    for text in texts:
        if len(text.ids) > longest:
            out["too long"] += 1
        elif not text.trained.any():
            out["nothing trained"] += 1
        else:
            kept.append(text)
    return kept, out
