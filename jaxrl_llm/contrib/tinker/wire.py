"""Tinker's messages as arrays and back. The client's own package defines them."""
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from jaxrl_llm.contrib.tinker.examples import Datum
from jaxrl_llm.contrib.tinker.learner import PassResult
from jaxrl_llm.engines.engine import Node, Request
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.serving.requests import SEEDS, STOP_LETTERS, STOPS, RequestError

_DTYPES: dict[Any, np.dtype] = {messages.DTYPE_FLOAT32: np.dtype("<f4"), messages.DTYPE_INT64: np.dtype("<i8"),
                                messages.DTYPE_INT32: np.dtype("<i4")}
_UNSUPPORTED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k",
                "record_stability_info")


class PassRequest(NamedTuple):
    """A request for a pass over examples: its model, its number, the loss with its settings, and whether to take gradients."""

    model: str
    number: int
    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    backward: bool


def read_pass(body: bytes) -> PassRequest:
    """A `ForwardBackwardRequest`. Raises `RequestError` for malformed bytes, and for fields it cannot read."""
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.HasField("text") else value.number
    data = [_datum(i, one) for i, one in enumerate(message.data)]
    return PassRequest(message.model_id, message.seq_id, data, message.loss_fn, settings, not message.forward_only)


def _datum(i: int, message) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in message.model_input):
        raise RequestError(f"data[{i}] holds other chunks than encoded_text; this server reads tokens alone")
    tokens = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in message.model_input]
    fields = {name: _array(f"data[{i}]: {name}", tensor) for name, tensor in message.loss_fn_inputs.items()}
    if "target_tokens" not in fields:
        raise RequestError(f"data[{i}] has no target_tokens in loss_fn_inputs; give one for each token of model_input")
    targets = fields.pop("target_tokens")
    if targets.dtype.kind != "i":
        raise RequestError(f"data[{i}]: target_tokens are {targets.dtype}; give whole numbers (int64)")
    return Datum(np.concatenate([np.zeros(0, np.int32), *tokens]), targets,
                 {name: values.astype(np.float32) for name, values in fields.items()})


def _array(what: str, tensor) -> np.ndarray:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise RequestError(f"{what} has the shape {list(tensor.shape)}; this server takes one number for each token, dense")
    if tensor.dtype not in _DTYPES or len(tensor.dense) % _DTYPES[tensor.dtype].itemsize:
        raise RequestError(f"{what} is no array of float32 or int64")
    return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype])


def write_pass(outcome: PassResult) -> bytes:
    """A `ForwardBackwardOutput`: for each example `logprobs` and `elementwise_loss`, and the metric `loss:sum`."""
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": outcome.loss})
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outcome.logprobs))
    for name, arrays in (("logprobs", outcome.logprobs), ("elementwise_loss", outcome.losses)):
        offsets = np.cumsum([0, *(4 * len(x) for x in arrays)]).astype("<i8")
        record.fields[name].CopyFrom(messages.BatchedTensor(
            data=np.concatenate(arrays).astype("<f4").tobytes(), offsets=offsets.tobytes(), dtype=messages.DTYPE_FLOAT32))
    return message.SerializeToString()


def prompt_of(request: types.SampleRequest) -> list[int]:
    """The prompt's tokens. Raises `RequestError` for one that is not text, and for options that this server lacks."""
    if set_ := [name for name in _UNSUPPORTED if getattr(request, name)]:
        own = " (the loss 'stable_reinforce' needs it; train with loss_fn='importance_sampling')"
        raise RequestError(f"{set_[0]} is not supported by this server; leave it out"
                           f"{own if set_[0] == 'record_stability_info' else ''}")
    if any(not isinstance(chunk, types.EncodedTextChunk) for chunk in request.prompt.chunks):
        raise RequestError("the prompt holds other chunks than encoded_text; this server reads tokens alone")
    return request.prompt.to_ints()


def requests_of(request: types.SampleRequest, stop_ids: Sequence[int], slot_tokens: int, most: int) -> list[Request]:
    """One request to the engine for each sample; sample i draws by `seed + i`. Raises `RequestError`.

    `stop_ids`: tokens that end a completion if `stop` is not given.  `most`: maximum number of samples.
    """
    asked, prompt = request.sampling_params, prompt_of(request)
    if not 0 < request.num_samples <= most:
        raise RequestError(f"num_samples={request.num_samples}; give 1 to {most}")
    stop = asked.stop
    texts = [stop] if isinstance(stop, str) else [] if stop is None else [one for one in stop if isinstance(one, str)]
    tokens = list(stop_ids) if stop is None else [one for one in stop if isinstance(one, int)]
    if stop is not None and len(texts) + len(tokens) > STOPS or any(len(text) > STOP_LETTERS for text in texts):
        raise RequestError(f"stop has {len(texts) + len(tokens)} entries, the longest text of "
                           f"{max(map(len, texts), default=0)} letters; give up to {STOPS}, texts of up to "
                           f"{STOP_LETTERS} letters")
    limit = slot_tokens - len(prompt) if asked.max_tokens is None else asked.max_tokens
    sampling = Sampling(temperature=asked.temperature, top_k=asked.top_k if asked.top_k > 0 else None,
                        top_p=asked.top_p if asked.top_p < 1 else None)
    one = Request(0, limit, prompt, sampling=sampling, stop_tokens=tokens, stop_texts=texts, stops_in_context=True)
    seed = secrets.randbelow(2**53) if asked.seed is None else asked.seed
    return [dataclasses.replace(one, seed=(seed + i) % SEEDS) for i in range(request.num_samples)]


def write_samples(nodes: Sequence[Node], prompt_logprobs: np.ndarray | None) -> bytes:
    """A `SampleResponse`; `prompt_logprobs` holds NaN where there is none."""
    message: Any = messages.SampleResponse()
    for node in nodes:
        stopped = node.finish in ("stop", "stop_string")
        message.sequences.add(stop_reason=messages.STOP_REASON_STOP if stopped else messages.STOP_REASON_LENGTH,
                              tokens=node.tokens.astype("<i4").tobytes(), logprobs=node.logprobs.astype("<f4").tobytes())
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return message.SerializeToString()
