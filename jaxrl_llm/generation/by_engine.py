"""Single-turn generation by an engine: the completions of `sampler.generate`, with fewer rows at a time, as they end."""
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.generation.engine import Engine
from jaxrl_llm.generation.requests import Request
from jaxrl_llm.generation.sampler import Completions
from jaxrl_llm.generation.sampling import Sampling
from jaxrl_llm.models.transformer import Transformer


def generate(model: Transformer, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *, max_tokens: int,
             stop_ids: tuple[int, ...], slots: int, stop_texts: Sequence[str] = (), tokenizer=None, lora=None,
             limits=None, paged: bool = False) -> Iterator[Completions]:
    """Samples the tokens of `sampler.generate` on one device, in an engine with `slots` rows; yields them as `completed` does.

    A completion ends at its first stop text; the tokenizer decodes the tokens to find it. `limits`: as in `sampler.generate`;
    `paged`: as in `Engine`.
    """
    prompts, mask, words = (np.asarray(x) for x in jax.device_get((prompt_tokens, prompt_mask, jax.random.key_data(keys))))
    P, G = words.shape[:2]
    engine = Engine(model, params, jax.random.key(0), slots=slots, slot_tokens=prompts.shape[1] + max_tokens,
                    tokenizer=tokenizer, lora=lora, paged=paged)
    asked = dataclasses.replace(request_of(sampling, max_tokens, stop_ids), stop_texts=tuple(stop_texts))
    own = np.minimum(asked.limit, np.full(P, asked.limit) if limits is None else np.asarray(jax.device_get(limits)))
    engine.submit(*(dataclasses.replace(asked, uid=p * G + g, tokens=prompts[p][mask[p]].tolist(), key=tuple(words[p, g]),
                                        limit=int(own[p])) for p in range(P) for g in range(G)))
    yield from completed(engine, P, G, max_tokens)


def request_of(sampling: Sampling, max_tokens: int, stop_ids: tuple[int, ...]) -> Request:
    """The request that all completions of a batch share."""
    limit = max_tokens if sampling.max_tokens is None else min(max_tokens, int(sampling.max_tokens))
    return Request(0, limit, sampling=sampling.replace(max_tokens=None), stop_tokens=stop_ids)


def completed(engine: Any, P: int, G: int, max_tokens: int) -> Iterator[Completions]:
    """The trajectories with uids 0 to P G - 1, requested from the engine, as completions of P prompts in host arrays.

    A part holds consecutive prompts and is yielded once all of their completions have ended. Decode steps of the parts add up
    to those of the longest completion.
    """
    arrays: dict[str, Any] = {name: np.zeros((P, G, max_tokens), dtype) for name, dtype in (
        ("tokens", np.int32), ("mask", bool), ("logprobs", np.float32), ("entropies", np.float32))}
    arrays["stopped"], running, first, steps = np.zeros((P, G), bool), np.full(P, G), 0, 0
    while first < P:
        nodes = engine.collect()
        assert nodes, f"no trajectory runs, and those of prompt {first} have not all ended"
        for node in nodes:
            row, count = divmod(node.uid, G), len(node.tokens)
            for name in ("tokens", "logprobs", "entropies"):
                arrays[name][row][:count] = getattr(node, name)
            arrays["mask"][row][:count], arrays["stopped"][row] = True, node.finish == "stop"
            running[row[0]] -= 1
        ended = first + int(np.argmax(np.append(running[first:], 1) > 0))
        if ended > first:
            part = {name: x[first:ended] for name, x in arrays.items()}
            more = max(steps, int(part["mask"].sum(-1).max()) - 1) - steps
            first, steps = ended, steps + more
            yield Completions(**part | {"decode_steps": np.int32(more)})
