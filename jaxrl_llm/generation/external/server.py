"""A server that samples for a run: its name, the weights that are published to it, and completions checked field by field."""
import hashlib
import json
import math
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.generation.engine import Request
from jaxrl_llm.generation.external.client import Client, Fault, Garbled, Refusal
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import merge

_FIRST_CONTACT = 30.0  # seconds for a server that has not answered yet
_KEPT = 2  # publications whose files stay: the one in use, and the one before, which may still be read


class Mismatch(RuntimeError):
    """Sampler and learner disagree about the log-probs of the same tokens."""


class Completion(NamedTuple):
    """What the server sampled: `tokens i32[n]`, `logprobs f32[n]`, `entropies f32[n]` (NaN where it does not say), the `tags`
    of the weights of each token, and why it ended: "stop", "stop_string" or "limit"."""

    tokens: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    tags: Sequence[str]
    finish: str


class Server:
    """A server with token ids and log-probs in its answers (`return_token_ids` of vLLM).

    Weights reach it as directories of safetensors, which it reads from a folder that both see (`update_weights_from_disk` of
    SGLang). Their tag is a digest of their bytes: a server that was started again with others, or missed a publication, does
    not answer with that tag, and gets them again.

    Attributes:
      url: of it.  tag: of the weights that were published last; "" before that.
    """

    def __init__(self, client: Client, config: ModelConfig, folder: Path | None, model: str = "", max_mismatch: float = 0.05):
        """
        Args:
          client: that asks it.
          config: of the model.
          folder: where weights are written for it; None: they cannot be published.
          model: the name by which it knows the model; empty: the only one that it has.
          max_mismatch: see `check`.
        """
        self.url, self.tag, self.max_mismatch = client.url, "", max_mismatch
        self._client, self._config, self._folder, self._model = client, config, folder, model
        self._given: list[Any] = []  # weak references to the weights that were published last
        self._again: Future | None = None  # a publication that is repeated

    def publish(self, params: Any, lora: Any = None) -> str:
        """The server samples with these weights from now on; returns their tag. Nothing happens where it does already.

        Raises `Refusal` where the server does not take them, `Fault` where it does not answer in time.
        """
        leaves = jax.tree.leaves((params, lora))
        if len(leaves) == len(self._given) and all(ref() is leaf for ref, leaf in zip(self._given, leaves)):
            return self.tag
        whole = jax.device_get(params if lora is None else merge(params, lora))
        self.tag = digest(whole)
        if self.served() != self.tag:
            if self._folder is None:
                raise Refusal(f"the weights of the run are to reach {self.url}, and no folder is named through which; set "
                              "server.weights to one that both see")
            self._write(whole)
            self._read_again().result()
        self._given = [weakref.ref(leaf) for leaf in leaves]
        return self.tag

    def served(self) -> str | None:
        """The tag of the weights that the server says it serves; None where it does not say."""
        return self._client.ask("GET", "/v1/models", None, lambda answer: _tag(_model(answer, self._model, self.url)),
                                deadline=None if self._given else _FIRST_CONTACT).result()

    def complete(self, request: Request, tokens: Sequence[int], limit: int, seed: int) -> "Future[Completion]":
        """Up to `limit` tokens behind these. The future raises `Refusal` and `Fault`, see `Client.ask`."""
        s = request.sampling
        optional = {"top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p, "model": self._name()}
        body = {"prompt": [int(token) for token in tokens], "max_tokens": limit, "temperature": float(s.temperature),
                "seed": seed, "stop": list(request.stop_texts), "stop_token_ids": [int(token) for token in request.stop_tokens],
                "logprobs": 0, "return_token_ids": True,
                **{name: value if isinstance(value, str) else np.asarray(value).item()
                   for name, value in optional.items() if value is not None}}
        read = reader(body, self._config.vocab_size)

        def current(answer):
            found = read(answer)
            if found.tags and self.tag and self.tag not in found.tags:
                self._stale(found.tags[-1])
            return found._replace(tags=found.tags or [self.tag] * len(found.tokens))

        return self._client.ask("POST", "/v1/completions", body, current, waits=True)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises `Mismatch` where `mismatch/kl` of a batch is more than `max_mismatch` nats a token."""
        gap = metrics.get("mismatch/kl", 0.0)
        if not abs(gap) <= self.max_mismatch:
            raise Mismatch(
                f"sampler and learner disagree: mismatch/kl is {gap:.3g} nats a token, more than "
                f"server.max_mismatch={self.max_mismatch:g}. "
                f"The server {self.url} says that it serves the weights {self.served()!r}; the run published {self.tag!r}. "
                "Where these are the same it computes other log-probs: those before temperature (vLLM wants --logprobs-mode "
                "processed_logprobs), or in another precision. No checkpoint holds this step: resume from the last one")

    def _stale(self, tag: str) -> None:
        """The server samples with other weights: it gets the right ones, and the request is sent again."""
        if self._folder is None:
            raise Refusal(f"{self.url} serves the weights {tag!r}, the run published {self.tag!r}")
        if self._again is None or self._again.done():
            self._again = self._read_again()
        raise Fault(f"it serves the weights {tag!r}, the run published {self.tag!r}")

    def _read_again(self) -> Future:
        """Tells the server to read the weights that were published last."""
        body = {"model_path": str(self._folder / self.tag), "weight_version": self.tag}
        return self._client.ask("POST", "/update_weights_from_disk", body, _updated)

    def _name(self) -> str:
        if not self._model:
            self._model = self._client.ask("GET", "/v1/models", None, lambda answer: _model(answer, "", self.url)["id"],
                                           deadline=_FIRST_CONTACT).result()
        return self._model

    def _write(self, params: Any) -> None:
        """The directory of these weights; older ones but the last are removed."""
        folder = self._folder / self.tag
        if not folder.is_dir():
            part = self._folder / f"{self.tag}.part"
            shutil.rmtree(part, ignore_errors=True)
            weights.save_hf(part, self._config, params)
            part.rename(folder)
        folder.touch()
        others = [one for one in self._folder.iterdir() if one.is_dir() and len(one.name) == len(self.tag) and one != folder]
        for old in sorted(others, key=lambda one: one.stat().st_mtime)[:1 - _KEPT or None]:
            shutil.rmtree(old, ignore_errors=True)


def digest(params: Any) -> str:
    """16 hexadecimal digits that follow from the names, shapes and bytes of these arrays of the host."""
    made = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        made.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        made.update(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
    return made.hexdigest()


def reader(body: Mapping[str, Any], vocab_size: int) -> Callable[[Any], Completion]:
    """What checks an answer to a request for one completion, see `Client.ask`."""
    def read(answer):
        choice = _one(answer, "choices")
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise Refusal(f"the server answers without token_ids (it has {', '.join(sorted(choice))}); take one that knows "
                          "return_token_ids, such as this project's, or vLLM")
        if not tokens or len(tokens) > body["max_tokens"] or not all(type(i) is int and 0 <= i < vocab_size for i in tokens):
            raise Garbled(f"{len(tokens)} token_ids; there are to be 1 to {body['max_tokens']}, each from 0 to "
                          f"{vocab_size - 1}")
        if choice.get("prompt_token_ids", body["prompt"]) != body["prompt"]:
            raise Refusal("the server puts other tokens in the place of the prompt that it is given; its completions would be "
                          "of other conversations")
        logprobs = _column(choice.get("logprobs"), "token_logprobs", len(tokens))
        entropies = _column(choice, "entropies", len(tokens)) if choice.get("entropies") is not None else np.full(
            len(tokens), np.nan, np.float32)
        versions = choice.get("weight_versions")
        if versions is None:
            tag = _tag(answer)
            versions = [] if tag is None else [tag] * len(tokens)
        elif not isinstance(versions, list) or len(versions) != len(tokens):
            raise Garbled(f"weight_versions are not {len(tokens)} names")
        return Completion(np.asarray(tokens, np.int32), logprobs, entropies, versions, _finish(choice))
    return read


def _finish(choice: Mapping[str, Any]) -> str:
    if choice.get("finish_reason") == "length":
        return "limit"
    if choice.get("finish_reason") != "stop":
        raise Garbled(f"finish_reason is {choice.get('finish_reason')!r}, not 'stop' or 'length'")
    return "stop_string" if isinstance(choice.get("stop_reason"), str) else "stop"


def _column(where: Any, name: str, count: int) -> np.ndarray:
    """f32[count]: the numbers by this name."""
    values = where.get(name) if isinstance(where, Mapping) else None
    if not isinstance(values, list) or len(values) != count or not all(
            isinstance(x, (int, float)) and math.isfinite(x) for x in values):
        raise Garbled(f"{name} are not {count} numbers: {json.dumps(values)[:100]}")
    return np.asarray(values, np.float32)


def _one(answer: Any, name: str) -> Mapping[str, Any]:
    """The only entry of a list of objects."""
    entries = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise Garbled(f"an answer without one entry in {name!r}: {str(answer)[:200]!r}")
    return entries[0]


def _model(answer: Any, name: str, url: str) -> Mapping[str, Any]:
    """The entry of a model in a list of them: the one of this name, or the only one."""
    entries = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(one, Mapping) and isinstance(one.get("id"), str) for one in entries):
        raise Garbled(f"no list of models: {str(answer)[:200]!r}")
    found = [one for one in entries if name in ("", one["id"])]
    if len(found) != 1:
        raise Refusal(f"{url} serves {', '.join(one['id'] for one in entries) or 'no model'}; set server.model to one of them")
    return found[0]


def _tag(answer: Mapping[str, Any]) -> str | None:
    """The version of the weights that an answer names."""
    metadata = answer.get("metadata")
    tag = metadata.get("weight_version") if isinstance(metadata, Mapping) else None
    return None if tag is None else str(tag)


def _updated(answer: Any) -> None:
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        raise Refusal(f"the server did not take the weights: {str(answer)[:300]}")
