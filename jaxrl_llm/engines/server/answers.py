"""Answers of a server, checked field by field."""
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.engines.server.client import Garbled, Refusal

_LARGEST = 3e38  # numbers beyond are infinite in float32
_ROUNDING = 1e-3  # by which log-probs may exceed 0


class Completion(NamedTuple):
    """What the server sampled.

    Attributes:
      tokens: `i32[n]`.  logprobs: `f32[n]`.  entropies: `f32[n]`, NaN where the server does not report them.
      tags: tag of the weights that drew each token; empty if the server reports none.
      finish: why the completion ended: "stop", "stop_string" or "limit", see `engine.Node`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    tags: Sequence[str]
    finish: str


class ServedModelInfo(NamedTuple):
    """What the server reports about a model; None for what it does not report.

    Attributes:
      name: name of the model.  tag: tag of its weights.  most: maximum number of tokens of a prompt with its completion.
    """

    name: str
    tag: str | None
    most: int | None


def completion(body: Mapping[str, Any], vocab_size: int) -> Callable[[Any], Completion]:
    """A function that reads the answer to this request for one completion, see `Client.ask`."""
    def read(answer):
        choice = _one(answer, "choices")
        tokens, most = choice.get("token_ids"), body["max_tokens"]
        if not isinstance(tokens, list):
            raise Refusal(f"the server answers without token_ids (it has {', '.join(sorted(choice))}); take one that knows "
                          "return_token_ids")
        if not 1 <= len(tokens) <= most or not all(type(i) is int and 0 <= i < vocab_size for i in tokens):
            raise Garbled(f"{len(tokens)} token_ids; allowed are 1 to {most}, each from 0 to {vocab_size - 1}")
        if choice.get("prompt_token_ids", body["prompt"]) != body["prompt"]:
            raise Refusal("the server replaces the tokens of the prompt that it is given; its completions would be of other "
                          "conversations")
        finish = _finish(body, choice.get("finish_reason"), tokens)
        logprobs = _column(choice.get("logprobs"), "token_logprobs", len(tokens))
        if logprobs.max() > _ROUNDING:
            raise Garbled(f"token_logprobs has {logprobs.max():g}; log-probs are 0 at most")
        entropies = (_column(choice, "entropies", len(tokens)) if choice.get("entropies") is not None
                     else np.full(len(tokens), np.nan, np.float32))
        return Completion(np.asarray(tokens, np.int32), logprobs, entropies, _tags(answer, choice, len(tokens)), finish)
    return read


def description(answer: Any, name: str, url: str) -> ServedModelInfo:
    """The entry of a model in the list of models: the one with this name, or the only one if the name is empty."""
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(one, Mapping) and isinstance(one.get("id"), str) for one in entries):
        raise Garbled(f"no list of models: {str(answer)[:200]!r}")
    matches = [one for one in entries if name in ("", one["id"])]
    if len(matches) != 1:
        raise Refusal(f"{url} serves {', '.join(one['id'] for one in entries) or 'no model'}; set server.model to one of them")
    most = matches[0].get("max_model_len")
    return ServedModelInfo(matches[0]["id"], _tag(matches[0]), most if type(most) is int else None)


def updated(answer: Any) -> None:
    """Raises `Refusal` unless the server accepted the weights, in SGLang's form."""
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        raise Refusal(f"the server did not take the weights: {str(answer)[:300]}")


def reloaded(answer: Any) -> None:
    """Raises `Refusal` unless all workers of vLLM accepted the weights: each returns nothing, and errors are statuses."""
    results = answer.get("results") if isinstance(answer, Mapping) else None
    if not isinstance(results, list) or not results or any(one is not None for one in results):
        raise Refusal(f"the server did not take the weights: {str(answer)[:300]}")


def cleared(answer: Any) -> None:
    """Raises `Garbled` unless vLLM dropped its keys and values; some versions say so by an empty answer."""
    if answer != "" and not (isinstance(answer, Mapping) and answer.get("success") is True):
        raise Garbled(f"the server did not drop keys and values of earlier weights: {str(answer)[:300]}")


def _finish(body: Mapping[str, Any], reason: Any, tokens: Sequence[int]) -> str:
    """Why the completion ended, judged by its tokens: servers differ in what they report beside "stop"."""
    if reason not in ("stop", "length"):
        raise Garbled(f"finish_reason is {reason!r}, not 'stop' or 'length'")
    if tokens[-1] in body["stop_token_ids"]:
        return "stop"
    if reason == "length" and len(tokens) < body["max_tokens"]:
        raise Garbled(f"finish_reason is 'length' after {len(tokens)} of {body['max_tokens']} tokens")
    if reason == "stop" and not body["stop"]:
        raise Garbled(f"finish_reason is 'stop' behind the token {tokens[-1]}, which is no stop token of the request")
    return "limit" if reason == "length" else "stop_string"


def _tags(answer: Mapping[str, Any], choice: Mapping[str, Any], count: int) -> list[str]:
    """The tag of each token, or of the whole answer."""
    each = choice.get("weight_versions")
    if each is None:
        tag = _tag(answer)
        return [] if tag is None else [tag] * count
    if not isinstance(each, list) or len(each) != count:
        raise Garbled(f"weight_versions are not {count} names")
    return [str(one) for one in each]


def _column(where: Any, name: str, count: int) -> np.ndarray:
    """The numbers with this name, f32[count]."""
    values = where.get(name) if isinstance(where, Mapping) else None
    if not isinstance(values, list) or len(values) != count or not all(
            type(x) in (int, float) and -_LARGEST < x < _LARGEST for x in values):
        raise Garbled(f"{name} are not {count} numbers: {json.dumps(values)[:100]}")
    return np.asarray(values, np.float32)


def _one(answer: Any, name: str) -> Mapping[str, Any]:
    """The only entry of a list of objects."""
    entries = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise Garbled(f"an answer without one entry in {name!r}: {str(answer)[:200]!r}")
    return entries[0]


def _tag(entry: Mapping[str, Any]) -> str | None:
    """The version of the weights that an answer or the entry of a model names."""
    metadata = entry.get("metadata")
    tag = metadata.get("weight_version") if isinstance(metadata, Mapping) else None
    return None if tag is None else str(tag)
