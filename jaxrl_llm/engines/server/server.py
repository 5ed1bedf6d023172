"""A server that samples for a run: weights are published to it, and its completions are checked."""
import hashlib
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.engines.requests import Request, as_ints
from jaxrl_llm.engines.server import answers
from jaxrl_llm.engines.server.answers import Completion
from jaxrl_llm.engines.server.client import Client, Fault, Refusal, ServerError
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import merge
from jaxrl_llm.tools import key_values

_FIRST_CONTACT = 30.0  # seconds for a server that has not answered yet
_KEPT = 2  # publications whose files stay: the one in use, and the one before, which may still be read
_ADVICE = {  # for a server that does not know a request
    "sglang": "set server.reload to vllm, or to folder for a server that has neither's",
    "vllm": "start vLLM, 0.16 or later, with VLLM_SERVER_DEV_MODE=1, or set server.reload to folder",
}
RELOADS = (*_ADVICE, "folder")


class Stale(ServerError):
    """An answer sampled by other weights than those published at the time of the request."""


class Mismatch(RuntimeError):
    """Sampler and learner disagree about the log-probs of the same tokens."""


class Server:
    """A server that answers with token ids and log-probs, and reads weights from a folder that it shares with the run.

    The tag of weights is a digest of their bytes. A server that restarted, or missed a publication, does not answer with the
    latest published tag: it is then asked to read those weights again.

    Attributes:
      url: address of the server.  tag: tag of the weights published last; "" before the first publication.
      max_mismatch: see `check`.
    """

    def __init__(self, client: Client, config: ModelConfig, folder: Path, model: str = "", max_mismatch: float = 0.05,
                 reload: str = "sglang", stop_ids: Sequence[int] = ()):
        """
        Args:
          client: sends the requests.
          config: architecture of the model.
          folder: folder in which weights are written for the server.
          model: the server's name for the model; empty: the only model that it has.
          reload: how it learns of new weights, one of `RELOADS`: by a request that SGLang or vLLM has, or "folder": by itself
            from the link `latest` in the folder.
          stop_ids: tokens that end a completion, which the written config.json names; each request names them too.
        """
        self.url, self.tag, self.max_mismatch = client.url, "", max_mismatch
        self._client, self._config, self._folder, self._model, self._reload = client, config, folder, model, reload
        self._stop_ids = stop_ids
        self._given: list[Any] = []  # weak references to the weights that were published last
        self._taken = ""  # tag of the weights that the server is known to have; "" if a request for others failed
        self._order: dict[str, int] = {}  # tag -> number of its last publication
        self._most: int | None = None  # maximum number of tokens of a prompt with its completion
        self._written: list[Path] = []

    def publish(self, params: Any, lora: Any = None) -> str:
        """Makes the server sample with these weights from now on; returns their tag. Does nothing if it already does.

        Raises `Refusal` if the server does not accept them, `Fault` if it does not answer in time.
        """
        leaves = jax.tree.leaves((params, lora))
        same = len(leaves) == len(self._given) and all(ref() is leaf for ref, leaf in zip(self._given, leaves))
        if same and self._taken == self.tag:
            return self.tag
        whole = jax.device_get(params if lora is None else merge(params, lora))
        self.tag = digest(whole)
        self._order[self.tag] = max(self._order.values(), default=0) + 1
        self._write(whole)
        serves = self.served()
        if serves != self.tag and (serves is not None or self._taken != self.tag):
            self._hand_over()
        self._taken = self.tag
        self._given = [weakref.ref(leaf) for leaf in leaves]
        return self.tag

    def renew(self) -> None:
        """Makes the server read the latest published weights again, unless it reports that it serves them."""
        if self.served() != self.tag:
            self._hand_over()

    def served(self, wanted: str = "") -> str | None:
        """The tag of the weights that the server reports as served; None if it reports none. Errors as in `publish`.

        If it reports tags, waits for the one that is `wanted`.
        """
        def read(answer):
            found = answers.description(answer, self._model, self.url)
            if wanted and found.tag not in (None, wanted):
                raise Fault(f"it serves the weights {found.tag!r}, not yet {wanted!r}")
            return found

        description = self._client.ask("GET", "/v1/models", None, read,
                                       None if self._given or wanted else min(_FIRST_CONTACT, self._client.deadline)).result()
        self._model, self._most = description.name, description.most
        return description.tag

    def check_room(self, tokens: int) -> None:
        """Raises `Refusal` if the server's limit for a prompt with its completion is below `tokens`; call after `publish`."""
        if self._most is not None and self._most < tokens:
            raise Refusal(f"a prompt with its completion may have {tokens} tokens, and {self.url} holds {self._most}; start it "
                          f"for {tokens} (--slot_tokens={tokens}), or lower sampling.max_tokens or prompts.max_tokens")

    def complete(self, request: Request, tokens: Sequence[int], limit: int, seed: int) -> "Future[Completion]":
        """Requests up to `limit` tokens after these. The future raises `Stale`, `Refusal` and `Fault`, see `Client.ask`."""
        s, wanted = request.sampling, self._order[self.tag]
        off = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}  # sent, as servers may have other defaults
        body = {"model": self._model, "prompt": as_ints(tokens), "max_tokens": limit, "seed": seed,
                "stop": list(request.stop_texts), "stop_token_ids": as_ints(request.stop_tokens),
                "logprobs": 0, "return_token_ids": True,
                **{name: value if getattr(s, name) is None else np.asarray(getattr(s, name)).item()
                   for name, value in off.items()}}
        read = answers.completion(body, self._config.vocab_size)

        def current(answer):
            completion = read(answer)
            for tag in completion.tags:
                if self._order.get(tag, -1) < wanted:
                    raise Stale(f"{self.url} answers with the weights {tag!r}; the run published {self.tag!r}")
            return completion._replace(tags=completion.tags or [self.tag] * len(completion.tokens))

        return self._client.ask("POST", "/v1/completions", body, current)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises `Mismatch` where `mismatch/kl` of a batch is more than `max_mismatch` nats a token."""
        gap = metrics.get("mismatch/kl", 0.0)
        if abs(gap) > self.max_mismatch:
            try:
                says = f"says that it serves the weights {self.served()!r}"
            except ServerError as error:
                says = f"does not say which weights it serves ({error})"
            raise Mismatch(
                f"sampler and learner disagree: mismatch/kl is {gap:.3g} nats a token, more than "
                f"server.max_mismatch={self.max_mismatch:g}. The server {self.url} {says}; the run published {self.tag!r}. "
                "Where these are the same it computes other log-probs: of the distribution before temperature, in another "
                "precision, or, with top_k, top_p or min_p, of what they leave. No checkpoint holds this step: resume from the "
                "last one")

    def close(self) -> None:
        """Cancels open requests."""
        self._client.close()

    def _hand_over(self) -> None:
        """Lets the server read the weights that were published last."""
        self._taken = ""
        try:
            for address, body, read in self._requests():
                self._client.ask("POST", address, body, read).result()
        except Refusal as refusal:
            raise Refusal(f"{refusal}; if it has no such request, {_ADVICE[self._reload]}") from refusal
        serves = self.served(self.tag if self._reload == "folder" else "")
        if serves not in (None, self.tag):
            raise Refusal(f"{self.url} was given the weights {self.tag!r} and says that it serves {serves!r}; where several "
                          "runs publish to one server, give each its own")
        self._taken = self.tag

    def _requests(self) -> list[tuple[str, dict[str, Any] | None, Callable[[Any], None]]]:
        """The address, body and reader of each request after which the server uses the weights that were published last."""
        path = str(self._folder / self.tag)
        if self._reload == "sglang":
            return [("/update_weights_from_disk", {"model_path": path, "weight_version": self.tag}, answers.updated)]
        if self._reload == "vllm":  # it would else read keys and values of earlier weights for prompts that it knows
            return [("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}, answers.reloaded),
                    ("/reset_prefix_cache?reset_running_requests=true", None, answers.cleared)]
        return []

    def _write(self, params: Any) -> None:
        """Writes these weights, at once for readers; removes this run's older ones but the last."""
        folder = self._folder / self.tag
        if not folder.is_dir():
            part = self._folder / f"{self.tag}.part"
            shutil.rmtree(part, ignore_errors=True)
            weights.save_hf(part, self._config, params, stop_ids=self._stop_ids)
            part.rename(folder)
        if self._reload == "folder":
            link = self._folder / "latest.part"
            link.unlink(missing_ok=True)
            link.symlink_to(self.tag)
            link.replace(self._folder / "latest")
        self._written = [*(one for one in self._written if one != folder), folder]
        while len(self._written) > _KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)


def digest(params: Any) -> str:
    """16 hexadecimal digits derived from the names, shapes and bytes of these host arrays."""
    made = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        made.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return made.hexdigest()


def keys(c: ConfigDict) -> None:
    """A server that samples."""
    c.server = ConfigDict()            # a server that samples instead of this process, see docs/guides/serving.md
    c.server.url = ""                  # its address, e.g. "http://127.0.0.1:8000"; empty: this process samples
    c.server.model = ""                # name of the model on the server; empty: its only one
    c.server.weights = ""              # folder through which it receives weights; both see it under the same path
    c.server.reload = "sglang"         # how it learns of them: by a request of "sglang" or "vllm", or from the "folder" alone
    c.server.deadline = 600.0          # seconds for a request with all its retries; beyond it the run ends
    c.server.max_mismatch = 0.05       # largest mismatch/kl of a batch, nats per token; beyond it the run ends


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.at_least(config, 0, "server.max_mismatch")
    yield from key_values.seconds(config, "server.deadline")
    yield from key_values.named(config, "server.reload", RELOADS)
    if config.server.url and not config.server.weights:
        yield (f"config.server.url={config.server.url!r} samples for the run, which writes weights for it; set "
               "config.server.weights to a folder that both see")
