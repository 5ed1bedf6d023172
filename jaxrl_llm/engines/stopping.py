"""Stop strings of a growing completion, as sequences of tokens and as texts, found on the host as tokens come in."""
import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

REST = "\N{REPLACEMENT CHARACTER}"  # of a letter whose rest may still come


def context(tokens: Sequence[int], tokenizer: Any) -> list[int]:
    """The tokens that are decoded with those behind them: the last letter's, or none if its rest may still come.

    Sentencepiece drops the space before the first of the tokens that it decodes.
    """
    ends = [np.asarray(tokens[-n:], np.int64).tolist() for n in range(1, 5)]  # a letter has up to four bytes, each a token
    texts = tokenizer.decode_batch(ends)
    return next((end for end, text in zip(ends, texts) if not text.endswith(REST)), [])


@dataclasses.dataclass
class StopSearch:
    """Where the first stop string of a completion ends.

    Texts are found by decoding the last call's tokens again together with the new ones: what a token spells may depend on the
    token before it, and a letter may need several tokens. A stop text may begin and end inside a token.

    Attributes:
      sequences: sequences of tokens that end a completion.  texts: texts that end it.
      tokenizer: decodes the tokens; unused without texts.
      before: tokens before the completion that are decoded with its first ones, see `context`.
      tokens: tokens of the completion so far.
      window, settled: tokens before `settled` are text for good; those from `window` on are decoded with the next ones.
      tail: the end of that text, in which a stop text may have begun.  searched: letters behind it that were searched too.
    """

    sequences: Sequence[Sequence[int]]
    texts: Sequence[str]
    tokenizer: Any = None
    before: Sequence[int] = ()
    tokens: list[int] = dataclasses.field(default_factory=list)
    window: int = 0
    settled: int = 0
    tail: str = ""
    searched: int = 0

    def feed(self, new: Iterable[int]) -> int | None:
        """Adds new tokens; returns the completion's length through the first stop string that ends in them, None for none."""
        start = len(self.tokens)
        self.tokens.extend(new)
        ends = [end for end in (self._sequence_end(start), self._text_end()) if end is not None]
        return min(ends, default=None)

    def _sequence_end(self, start: int) -> int | None:
        for end in range(start + 1, len(self.tokens) + 1 if self.sequences else 0):
            if any(len(stop) <= end and self.tokens[end - len(stop):end] == list(stop) for stop in self.sequences):
                return end
        return None

    def _text_end(self) -> int | None:
        if not self.texts or self.settled == len(self.tokens):
            return None
        before, now = self._decoded([self.settled, len(self.tokens)])
        fresh, end = now[len(before):], None
        if self._stops(fresh):
            ends = range(self.settled + 1, len(self.tokens))
            end = ends.start + bisect.bisect_left(ends, True, key=lambda n: self._stops(self._decoded([n])[0][len(before):]))
        if now.endswith(REST):
            self.searched = len(fresh.rstrip(REST))
        else:
            text = self.tail + fresh
            self.tail = text[max(len(text) - max(map(len, self.texts)) + 1, 0):]
            self.window, self.settled, self.searched = self.settled, len(self.tokens), 0
        return end

    def _decoded(self, ends: Iterable[int]) -> list[str]:
        before = () if self.window else self.before
        return self.tokenizer.decode_batch([[*before, *self.tokens[self.window:end]] for end in ends])

    def _stops(self, fresh: str) -> bool:
        """Whether a stop text ends in letters that were not searched before."""
        text, before = self.tail + fresh, len(self.tail) + self.searched
        return any(text.find(stop, max(before - len(stop) + 1, 0)) >= 0 for stop in self.texts)
