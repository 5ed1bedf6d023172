"""Bodies of requests in OpenAI's format, checked field by field and translated to the engine's requests."""
import dataclasses
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxrl_llm.engines.engine import Request
from jaxrl_llm.engines.sampling import Sampling
from jaxrl_llm.tokenizers import Tokenizer, conversation, messages
from jaxrl_llm.tokenizers.messages import shown
from jaxrl_llm.tools.registry import nearest

_COMPLETION_TOKENS = 16  # of /v1/completions without max_tokens, as OpenAI has it
STOPS = 16  # stop texts and stop tokens of a request
CHARACTERS, ENTRIES = 64, 8  # of texts and of lists and objects, for each token that a slot holds: more would not fit in it
STOP_LETTERS = 1000  # of a stop text: all of them are compared with the end of a completion, piece by piece
SEEDS = 2**63  # of the engine, from 0; seeds beyond and below count on from the other end
_SAMPLED = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "stream",
            "stream_options", "logprobs", "return_token_ids")
_UNREAD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # of people, not of text
# Fields that would change the text, with the values at which they do not:
_NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "response_format": ({"type": "text"},), "top_logprobs": (0,),
    "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,), "modalities": (["text"],), "min_tokens": (0,),
    "ignore_eos": (False,)}
_OWN = {False: ("prompt",), True: ("messages", "tools", "max_completion_tokens", "chat_template_kwargs",
                                   "continue_final_message", "add_generation_prompt")}


class RequestError(Exception):
    """A request that is not answered: the HTTP `status`, and the `param` and `code` of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class ClientLimits(NamedTuple):
    """Limits of one client.

    Attributes:
      completions: of a request.  requests: that are answered at the same time.  body: its bytes.
      arrival: seconds in which a body arrives, and in which it is understood.
      unread: seconds in which a client takes a piece of a stream.
      stalled: seconds after which an engine that ends no step and no call counts as lost.
    """

    completions: int = 64
    requests: int = 256
    body: int = 4 << 20
    arrival: float = 300.0
    unread: float = 60.0
    stalled: float = 1800.0


class CompletionRequest(NamedTuple):
    """What a body asks for.

    Attributes:
      prompts: token ids of each prompt.  n: completions of each.
      request: the part that all completions share.  seed: seed of the first one's draws; the others count up from it.
      stream, usage: whether to answer piece by piece, and with the number of tokens at the end.
      logprobs, token_ids: whether to return these beside the text.
      chat: whether the prompt is a conversation.
    """

    prompts: list[list[int]]
    n: int
    request: Request
    seed: int
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    chat: bool

    @property
    def requests(self) -> list[Request]:
        """One engine request for each completion, prompt by prompt."""
        rows = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [dataclasses.replace(self.request, tokens=prompt, seed=(self.seed + i) % SEEDS) for i, prompt in enumerate(rows)]


class Reader:
    """The fields of one body.

    A null value counts as absent. Raises `RequestError` for a wrong value, stating what was given and what is allowed.
    """

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise RequestError(f"the body is {shown(body)}; give a JSON object")
        self._body = {name: value for name, value in body.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def get(self, name: str, default: Any = None) -> Any:
        """The value, unchecked."""
        return self._body.get(name, default)

    def known(self, allowed: tuple[str, ...]) -> None:
        """Checks that no field is unknown, and that none of `_NEUTRAL` changes anything."""
        for name, value in self._body.items():
            if name in _NEUTRAL:
                if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL[name]):
                    raise RequestError(f"{name}={shown(value)} is not supported; leave it out, or give "
                                       f"{' or '.join(map(repr, _NEUTRAL[name]))}", name)
            elif name not in allowed + _UNREAD:
                near = nearest(name, allowed, 1)
                raise RequestError(f"unknown field {shown(name)}" + (f"; did you mean {near[0]!r}?" if near else "")
                                   + f" Allowed: {', '.join(sorted(allowed))}", name[:80])

    def number(self, name: str, kind: type, low: float, high: float, default: Any) -> Any:
        """A number of at least `low` and at most `high`; in JSON Schema 5.0 is an integer, too."""
        value = self._body.get(name, default)
        if value is default:
            return value
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or kind is float and isinstance(value, float)) or not low <= value <= high:
            kinds, form = ("a whole number", "d") if kind is int else ("a number", "g")
            raise RequestError(f"{name}={shown(value)}; give {kinds} from {low:{form}} to {high:{form}}", name)
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is absent."""
        value = self._body.get(name, False)
        if not isinstance(value, bool):
            raise RequestError(f"{name}={shown(value)}; give true or false", name)
        return value

    def texts(self, name: str) -> list[str]:
        """A text or a list of texts, none of them empty or too long."""
        value = self._body.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts) or len(texts) > STOPS:
            raise RequestError(f"{name}={shown(value)}; give a text that is not empty, or a list of up to {STOPS}", name)
        if (longest := max(map(len, texts), default=0)) > STOP_LETTERS:
            raise RequestError(f"{name} has a text of {longest} letters; give texts of up to {STOP_LETTERS}", name)
        return texts

    def ids(self, name: str, value: Any, vocab_size: int, most: int) -> list[int]:
        """Token ids of the vocabulary; `value` is a part of the field."""
        right = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size
                                                for i in value)
        if not right or len(value) > most:
            raise RequestError(f"{name}={shown(value)}; give a list of up to {most} token ids, 0 to {vocab_size - 1}", name)
        return value


def read(body: Any, chat: bool, tokenizer: Tokenizer, vocab_size: int, slot_tokens: int, name: str,
         limits: ClientLimits) -> CompletionRequest:
    """What a body of `/v1/chat/completions` (`chat`) or of `/v1/completions` asks for.

    Args:
      tokenizer, vocab_size: the model's tokenizer, and the number of tokens that it embeds.
      slot_tokens: maximum number of tokens of a prompt and its completion.
      name: name of the served model.
    Raises:
      RequestError: for fields that are unknown or wrong, and for what exceeds a limit.
    """
    fields = Reader(body)
    fields.known(_SAMPLED + _OWN[chat])
    if (model := fields.get("model", name)) != name:
        raise unserved(model, name)
    prompts = ([_conversation(fields, tokenizer, slot_tokens)] if chat
               else _prompts(fields, tokenizer, vocab_size, slot_tokens, limits))
    n = fields.number("n", int, 1, limits.completions, 1)
    if n * len(prompts) > limits.completions:
        raise RequestError(f"{len(prompts)} prompts with n={n} make {n * len(prompts)} completions; this server allows "
                           f"{limits.completions} in a request", "n")
    stops = fields.ids("stop_token_ids", fields.get("stop_token_ids", []), vocab_size, STOPS)
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise RequestError(f"stream_options={shown(options)}; give {{'include_usage': true}}", "stream_options")
    request = Request(
        uid=0, limit=_limit(fields, chat, max(map(len, prompts)), slot_tokens), sampling=_sampling(fields, vocab_size),
        stop_tokens=tuple(dict.fromkeys([*tokenizer.stop_ids, *stops])), stop_texts=tuple(fields.texts("stop")),
        stops_in_context=True)
    seed = fields.number("seed", int, -2**63, 2**63 - 1, None)
    return CompletionRequest(prompts, n, request, secrets.randbits(62) if seed is None else seed, fields.flag("stream"),
                             fields.flag("stream") and options.get("include_usage", False) is True, _logprobs(fields, chat),
                             fields.flag("return_token_ids"), chat)


def _limit(fields: Reader, chat: bool, longest: int, slot_tokens: int) -> int:
    """Maximum number of tokens of a completion whose prompt has up to `longest`."""
    room = slot_tokens - longest
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    limit = fields.number(name, int, 1, 2**31 - 1, None)
    wanted = limit or (1 if chat else _COMPLETION_TOKENS)
    if wanted > room:
        raise RequestError(f"a prompt of {longest} tokens and {name}={wanted} make {longest + wanted}; this server holds "
                           f"{slot_tokens} in all: shorten the prompt"
                           + (f", or give {name}={room} or less" if room > 0 else ""), name, code="context_length_exceeded")
    return limit or (room if chat else _COMPLETION_TOKENS)


def _sampling(fields: Reader, vocab_size: int) -> Sampling:
    """The distribution; OpenAI's and vLLM's ways to say "off" count as such."""
    top_k, top_p = fields.number("top_k", int, -1, 2**31 - 1, -1), fields.number("top_p", float, 0.0, 1.0, 1.0)
    if top_p == 0:
        raise RequestError("top_p=0; give a number above 0, or temperature=0 for the most likely token", "top_p")
    min_p = fields.number("min_p", float, 0.0, 1.0, 0.0)
    if min_p == 1:
        raise RequestError("min_p=1; give a number below 1, or temperature=0 for the most likely token", "min_p")
    return Sampling(fields.number("temperature", float, 0.0, 2.0, 1.0), top_k if 0 < top_k < vocab_size else None,
                    top_p if top_p < 1 else None, min_p or None)


def _logprobs(fields: Reader, chat: bool) -> bool:
    """Whether log-probs are asked for: `true` of a chat, 0 (no other tokens beside the sampled one) of a completion."""
    value = fields.get("logprobs", False)
    if chat or isinstance(value, bool):
        return fields.flag("logprobs")
    if value != 0 or isinstance(value, float):
        raise RequestError(f"logprobs={shown(value)}; give 0: the log-prob of the sampled token alone is kept", "logprobs")
    return True


def check_fits(value: Any, spellings: Iterable[str], slot_tokens: int) -> None:
    """Raises `RequestError` for what cannot fit into a slot, before anything is rendered or encoded, which takes far longer.

    Counted are characters of texts, entries of lists and objects, and `spellings` of control tokens, each a token at least.
    """
    characters, entries, spelled, level = CHARACTERS * slot_tokens, ENTRIES * slot_tokens, slot_tokens, [value]
    while level:
        texts = [one for one in level if isinstance(one, str)]
        level = [entry for one in level for entry in ((*one, *one.values()) if isinstance(one, dict) else
                                                      one if isinstance(one, list) else ())]
        entries, characters = entries - len(level), characters - sum(map(len, texts))
        for left, most, what in ((entries, ENTRIES * slot_tokens, "lists and objects with more than {} entries"),
                                 (characters, CHARACTERS * slot_tokens, "texts of more than {} characters")):
            if left < 0:
                raise RequestError(f"the prompt has {what.format(most)}; this server holds {slot_tokens} tokens in "
                                   "all: shorten it", code="context_length_exceeded")
        spelled -= sum(text.count(name) for name in spellings for text in texts)
    if spelled < 0:
        raise RequestError(f"the prompt spells more than {slot_tokens} control tokens; this server holds {slot_tokens} tokens "
                           "in all: shorten it", code="context_length_exceeded")


def _prompts(fields: Reader, tokenizer: Tokenizer, vocab_size: int, slot_tokens: int, limits: ClientLimits) -> list[list[int]]:
    """Token ids of `prompt`: a text, token ids, or a list of either."""
    if "prompt" not in fields:
        raise RequestError("the body has no prompt; give a text, a list of token ids, or a list of either", "prompt")
    given = fields.get("prompt")
    several = isinstance(given, list) and bool(given) and all(isinstance(one, (str, list)) for one in given)
    prompts = given if several else [given]
    if len(prompts) > limits.completions:
        raise RequestError(f"prompt has {len(prompts)} prompts; this server allows {limits.completions} in a request", "prompt")
    for text in prompts:
        if isinstance(text, str):
            check_fits(text, (), slot_tokens)
    encoded: list[list[int]] = []
    for one in prompts:
        encoded.append(_encoded(one, tokenizer) if isinstance(one, str) else fields.ids("prompt", one, vocab_size, 2**31))
        if len(encoded[-1]) > slot_tokens:  # which is refused, so the others need not be read
            break
    if not all(encoded):
        raise RequestError("an empty prompt; give one token at least", "prompt")
    return encoded


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a plain text, as the model was trained on it."""
    try:
        return tokenizer.encode(text, add_bos=tokenizer.adds_bos)
    except ValueError as error:
        raise RequestError(str(error), "prompt") from None


def _conversation(fields: Reader, tokenizer: Tokenizer, slot_tokens: int) -> list[int]:
    """Token ids of `messages` by the chat template, which gets `tools` and `chat_template_kwargs`."""
    given, tools, others = fields.get("messages"), fields.get("tools", []), fields.get("chat_template_kwargs", {})
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise RequestError(f"messages={shown(given)}; give a list of {{'role': ..., 'content': ...}}", "messages")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(f"tools={shown(tools)}; give a list of {{'type': 'function', 'function': ...}}", "tools")
    if not isinstance(others, dict):
        raise RequestError(f"chat_template_kwargs={shown(others)}; give an object", "chat_template_kwargs")
    check_fits([given, tools, others], tokenizer.control_tokens, slot_tokens)
    variables = others | _ending(fields) | ({"tools": tools} if tools and fields.get("tool_choice", "auto") != "none" else {})
    try:
        said = [messages.read(one, f"messages[{i}]") for i, one in enumerate(given)]
        ids = conversation.start(tokenizer, said, **variables)
        hidden = conversation.hidden(tokenizer, said, **variables)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(str(error), "messages") from None
    if hidden:
        raise RequestError(f"the chat template of this model leaves out {hidden}; describe it in the text of a message, or "
                           "take a model whose template shows tools", "tools" if hidden.startswith("the tool") else "messages")
    if not ids:
        raise RequestError("the chat template writes nothing for these messages", "messages")
    return ids


def _ending(fields: Reader) -> dict[str, bool]:
    """How the prompt ends, if a client says so; else the model continues a last message in the assistant's words."""
    names = [name for name in ("continue_final_message", "add_generation_prompt") if name in fields]
    given = {name: fields.flag(name) for name in names}
    if names == ["continue_final_message"]:
        given["add_generation_prompt"] = not given["continue_final_message"]
    return given


def unserved(given: Any, name: str) -> RequestError:
    """The refusal of another model than the one with this `name`."""
    return RequestError(f"model={shown(given)} is not served here; give {name!r}, or leave it out", "model", 404,
                        "model_not_found")
