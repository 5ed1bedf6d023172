"""Incremental text of a completion: only what no later token can change, and no part of a stop text."""
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.generation.requests import as_ints


@dataclasses.dataclass
class Spelling:
    """Spells a completion piece by piece; all pieces together are the text of all tokens, cut before the first stop text.

    Letters whose tokens are incomplete, and text that may begin a stop text, are held back.

    Attributes:
      tokenizer: decodes the tokens.  stops: texts that end the completion and are not part of it.
      tokens: tokens so far, behind those of `stopping.context`.
      window, settled: tokens before `settled` are spelled; those from `window` on are decoded with the next ones, as what a token
        spells may depend on the one before it.
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
        if last or not now.endswith("\N{REPLACEMENT CHARACTER}"):
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
