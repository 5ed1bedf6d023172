"""Answers in OpenAI's format, whole or piece by piece, with the fields that vLLM and SGLang add for training."""
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engines.engine import Node
from jaxrl_llm.engines.stopping import REST, context
from jaxrl_llm.serving.requests import CompletionRequest
from jaxrl_llm.serving.spelling import Spelling, TokenSpelling
from jaxrl_llm.tokenizers import Tokenizer

_FINISH = {"stop": "stop", "stop_string": "stop", "limit": "length", "running": None}


class PartialCompletion:
    """One completion while it is being sampled.

    Attributes:
      tokens: number of tokens so far.  finish: why it ended, in OpenAI's words; None: it continues.
    """

    def __init__(self, index: int, asked: CompletionRequest, tokenizer: Tokenizer, tags: Mapping[int, str]):
        self.index, self.tokens = index, 0
        self.finish: str | None = None
        self._asked, self._tokenizer, self._tags = asked, tokenizer, tags
        before = context(self._prompt, tokenizer)
        self._spelling = Spelling(tokenizer, asked.request.stop_texts, [*before], settled=len(before))  # it appends to its list
        self._token_spelling = TokenSpelling(tokenizer, before)

    def choice(self, node: Node, delta: bool) -> dict[str, Any]:
        """What a node adds, as an entry of `choices`; a whole answer (not `delta`) has a single node."""
        asked, ids = self._asked, node.tokens.tolist()
        first, self.tokens, self.finish = self.tokens == 0, self.tokens + len(ids), _FINISH[node.finish]
        text = self._spelling.feed(ids[:-1] if node.finish == "stop" else ids, last=self.finish is not None)
        made: dict[str, Any] = {"index": self.index, "finish_reason": self.finish}
        if not asked.chat:
            made["text"] = text
        elif delta:
            made["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            made["message"] = {"role": "assistant", "content": text}
        made["logprobs"] = self._logprobs(node) if asked.logprobs else None
        if node.finish in ("stop", "stop_string"):
            made["stop_reason"] = self._stop_reason(node)
        if asked.token_ids:
            made |= {"token_ids": ids, "entropies": _numbers(node.entropies),
                     "weight_versions": [self._tags[int(version)] for version in node.policy_version]}
            if not asked.chat and first:
                made["prompt_token_ids"] = self._prompt
        return made

    @property
    def _prompt(self) -> list[int]:
        return self._asked.prompts[self.index // self._asked.n]

    def _stop_reason(self, node: Node) -> str | int | None:
        """The requested stop text or token that ended the completion; None: the tokenizer's own end."""
        if node.finish == "stop":
            last = int(node.tokens[-1])
            return None if last in self._tokenizer.stop_ids else last
        return next((stop for stop in self._asked.request.stop_texts if self._spelling.held.startswith(stop)), None)

    def _logprobs(self, node: Node) -> dict[str, Any]:
        """Log-probs of the tokens of a node, of the distribution that each was drawn from."""
        texts, starts = self._token_spelling.feed(node.tokens.tolist())
        values = _numbers(node.logprobs)
        if self._asked.chat:
            return {"content": [{"token": text, "logprob": value, "bytes": None if REST in text else list(text.encode()),
                                 "top_logprobs": []} for text, value in zip(texts, values)]}
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": starts}


class Answer:
    """The frame around the choices of one request.

    Attributes:
      completions: in the order of their indices.
    """

    def __init__(self, asked: CompletionRequest, tokenizer: Tokenizer, name: str, tags: Mapping[int, str]):
        self.completions = [PartialCompletion(i, asked, tokenizer, tags) for i in range(len(asked.prompts) * asked.n)]
        self._asked, self._name, self._created = asked, name, int(time.time())
        self._id = ("chatcmpl-" if asked.chat else "cmpl-") + secrets.token_hex(12)

    def whole(self, nodes: Sequence[Node], tag: str) -> dict[str, Any]:
        """The answer to a request whose completions are these nodes, in order."""
        choices = [one.choice(node, delta=False) for one, node in zip(self.completions, nodes, strict=True)]
        return self._frame(choices, tag, chunk=False) | {"usage": self._usage()}

    def chunk(self, index: int, node: Node, tag: str) -> dict[str, Any]:
        """New tokens of one completion."""
        frame = self._frame([self.completions[index].choice(node, delta=True)], tag, chunk=True)
        return frame | ({"usage": None} if self._asked.usage else {})

    def last(self, tag: str) -> dict[str, Any]:
        """The last chunk, with the number of tokens."""
        return self._frame([], tag, chunk=True) | {"usage": self._usage()}

    def _frame(self, choices: list[dict[str, Any]], tag: str, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self._asked.chat else "text_completion"
        frame = {"id": self._id, "object": kind, "created": self._created, "model": self._name, "choices": choices,
                 "metadata": {"weight_version": tag}}
        if self._asked.chat and self._asked.token_ids:
            frame["prompt_token_ids"] = self._asked.prompts[0]
        return frame

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self._asked.prompts)), sum(one.tokens for one in self.completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _numbers(values: np.ndarray) -> list[float]:
    """The f32 numbers in the fewest digits that restore them exactly."""
    return [float(str(value)) for value in values]
