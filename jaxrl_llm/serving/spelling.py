"""Incremental text of a completion: only what no later token can change, and no part of a stop text; texts of its tokens."""
import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jaxrl_llm.engines.requests import as_ints
from jaxrl_llm.engines.stopping import REST


@dataclasses.dataclass
class Spelling:
    """Spells a completion piece by piece; all pieces together are the text of all tokens, cut before the first stop text.

    Letters whose tokens are incomplete, and text that may begin a stop text, are held back.

    Attributes:
      tokenizer: decodes the tokens.  stops: texts that end the completion and are not part of it.
      tokens: tokens so far, behind those of `stopping.context`.
      window, settled: tokens before `settled` are spelled; those from `window` on are decoded with the next ones, as what a
        token spells may depend on the one before it.
      held: text that is spelled but not passed on yet.  ended: whether a stop text was found.
    """

    tokenizer: Any
    stops: Sequence[str] = ()
    tokens: list[int] = dataclasses.field(default_factory=list)
    window: int = 0
    settled: int = 0
    held: str = ""
    ended: bool = False

    def feed(self, new: Sequence[int], last: bool = False) -> str:
        """The text that these tokens add; with `last` also the text held back. Empty after a stop text."""
        self.tokens += as_ints(new)
        before, now = self.tokenizer.decode_batch([self.tokens[self.window:self.settled], self.tokens[self.window:]])
        if last or not now.endswith(REST):
            self.held += now[len(before):]
            self.window, self.settled = self.settled, len(self.tokens)
        if self.ended:
            return ""
        ends = [self.held.index(stop) for stop in self.stops if stop in self.held]
        self.ended = bool(ends)
        kept = min(ends) if ends else len(self.held) - (0 if last else self._begun())
        text, self.held = self.held[:kept], self.held[kept:]
        return text

    def _begun(self) -> int:
        """How many letters at the end may be the beginning of a stop text."""
        lengths = range(min(max(map(len, self.stops), default=1) - 1, len(self.held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.held[-n:]) for stop in self.stops if n < len(stop))), 0)


@dataclasses.dataclass
class TokenSpelling:
    """Spells each token of a completion as it continues the text before it, special tokens by their names.

    Attributes:
      tokenizer: decodes the tokens.
      settled: the tokens of the last whole letters, at first those of `stopping.context`, which are decoded with the next one.
      open: tokens since then, which end amid a letter.
      letters, begun: letters of the text through `settled`, and whole ones of `open`.
    """

    tokenizer: Any
    settled: list[int] = dataclasses.field(default_factory=list)
    open: list[int] = dataclasses.field(default_factory=list)
    letters: int = 0
    begun: int = 0

    def feed(self, new: Sequence[int]) -> tuple[list[str], list[int]]:
        """The text of each token, with U+FFFD for parts of a letter, and how many letters precede it."""
        near = [self.settled[-1:], *([token] for token in as_ints(new))]
        alone = self._decoded(near)
        both = self._decoded([last + one for last, one in pairwise(near)])  # few letters need more than one token
        texts, starts = [], []
        for i, [token] in enumerate(near[1:]):
            if self.open or self.settled != near[i]:
                before, now = self._decoded([self.settled, [*self.settled, *self.open, token]])
            else:
                before, now = alone[i], both[i]
            texts.append(alone[i + 1] if self.open else now[len(before):])
            starts.append(self.letters + self.begun)
            self._add(token, now[len(before):])
        return texts, starts

    def _add(self, token: int, text: str) -> None:
        """Appends a token; `text` is that of `open` with it."""
        self.open.append(token)
        self.begun = len(text.rstrip(REST))
        if not text.endswith(REST):
            self.settled, self.open, self.letters, self.begun = self.open, [], self.letters + self.begun, 0

    def _decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self.tokenizer.decode_batch(rows, skip_special=False)
