"""The stream of a run: its engine, and the partner that answers the policy."""
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import parallel, tasks
from jaxrl_llm.engines import kinds
from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.base import Wanted
from jaxrl_llm.engines.prompts import bound, encode_problems, longest
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.sampling.dialogue import Dialogue
from jaxrl_llm.sampling.fitting import Encode, held_out
from jaxrl_llm.sampling.one_turn import OneTurn
from jaxrl_llm.sampling.shown_tools import describes_tools, hears_tools, warn_of_calls_left_out
from jaxrl_llm.sampling.stream import Partner, Stream
from jaxrl_llm.setup import parts
from jaxrl_llm.setup.judge import Judge
from jaxrl_llm.tasks.loader import batches
from jaxrl_llm.tools.files import expanded

Reads = int | Callable[[tasks.Problem], tasks.Problem | None]  # see `Topology.reads`


def make_server(config: ConfigDict, model: ModelConfig, stops: Sequence[int]) -> external.Server | None:
    """The server that samples instead of this process; None if `config.server` names none. No request is sent yet."""
    c = config.server
    if not c.url:
        return None
    if parallel.several():
        raise NotImplementedError("one process asks a server; run it on one process, or leave server.url empty")
    client = external.Client(c.url, os.environ.get("JAXRL_LLM_TOKEN", ""), c.deadline)
    return external.Server(client, model, expanded(c.weights).resolve(), c.model, c.max_mismatch, c.reload, stops)


def make_stream(config: ConfigDict, model: Transformer, mesh: Mesh, tokenizer, server: external.Server | None,
                asked: Sequence[Sequence[tasks.Problem]], judge: Judge, wanted: Mapping[str, str] | None = None,
                programs: int = 1, max_tokens: int = 0, columns: tuple[str, ...] = (), at_once: int | None = None,
                numbers: tuple[str, ...] = (), reads: Reads = 0) -> Stream:
    """The stream of a run.

    Args:
      server: samples if not None.
      asked: all problems to sample, those of training first; an environment opens a batch and an evaluation of them.
      judge: rewards trajectories.
      wanted: what the method asks of the engine, see `engines.base.CAN`, and what for.
      programs: kinds of distributions; evaluation sets that cut the distribution otherwise have another.
      max_tokens: T; 0: the one of training.
      columns: names of the further token columns that the method reads.
      at_once: rollouts of a prompt that begin together; None: `sampling.group`.
      numbers: those of the distribution that acts set.
      reads: most tokens that acts let the policy read in place of a prompt, or what it reads in place of a problem.
    """
    s = config.sampling
    T = max_tokens or s.max_tokens
    partner = make_partner(config, tokenizer, judge, asked, T)
    if partner.goes_on:  # an opening may cost a request to a server, so not all problems are opened before the first step
        first = batches(asked[0], min(config.prompts.per_step, len(asked[0])), config.seed).take(config.prompts.per_step)
        asked = [first, *(held_out(side, config.eval.problems) for side in asked[1:])]
    length = bound if partner.goes_on else longest
    prompt_tokens = prompt_length(config, asked, tokenizer, model.config.max_positions, partner.encode, T, length)
    prompt_tokens = parallel.agree(prompt_tokens)
    read_tokens = parallel.agree(read_length(reads, asked[0], tokenizer, partner.encode, length))
    check_positions(config, read_tokens, T, model.config.max_positions)
    partner.rest()
    stops = tuple(tokenizer.stop_ids) if partner.goes_on else stop_ids(tokenizer, s.stop_strings)
    replicas = parallel.sampler_mesh(mesh, s.tensor)
    if s.tensor:
        parallel.check_heads(replicas, model.config.num_heads, model.config.num_kv_heads)
    run = Wanted(
        model, replicas, tokenizer, config.prompts.per_step, at_once or s.group, 1 if partner.goes_on else s.micro_batches,
        max(prompt_tokens, read_tokens), T, stops, tuple(s.stop_strings), programs=programs, paged=s.paged_cache, server=server,
        columns=columns)
    several = mesh.size > 1 and not partner.goes_on and server is None
    wanted = wanted_of(config, wanted or {}, partner.goes_on, mesh.size if several else 1)
    sampling = dataclasses.replace(parts.sampling_of(config), max_tokens=np.int32(T),
                                   spread=np.float32(0) if "spread" in wanted else None)
    kind = kinds.choose(s.engine, run, wanted)
    partner.columns = kind.columns
    stream = Stream(kind, partner, sampling, config.prompts.per_step, s.group, prompt_tokens, T,
                    tokenizer, stops, mesh, model.dtype, tuple(s.stop_strings), replicas, numbers, read_tokens)
    if parallel.several() and partner.goes_on and not stream.alone:
        raise ValueError(f"engine {kind.name!r} samples with all processes together, and each plays environments of its own; "
                         "set sampling.engine='slots', or run it on one process")
    partner.alone = stream.alone
    return stream


def wanted_of(config: ConfigDict, wanted: Mapping[str, str], goes_on: bool, devices: int = 1) -> dict[str, str]:
    """What a run asks of its engine, see `engines.base.CAN`, and what for: what the method wants and what settings ask.

    `goes_on`: whether trajectories go on after words of an environment. `devices`: of a mesh that the engine samples on.
    """
    return {**wanted, **({"extend": f"environment {config.environment!r}"} if goes_on else {}),
            **({"mesh": f"a mesh of {devices} devices"} if devices > 1 else {}),
            **({"paged": "sampling.paged_cache=True"} if config.sampling.paged_cache else {})}


def make_partner(config: ConfigDict, tokenizer, judge: Judge, asked: Sequence[Sequence[tasks.Problem]], max_tokens: int
                 ) -> Partner:
    """What answers the policy: the runner of an environment, or a task whose reward scores one turn.

    Raises ValueError for a tokenizer without a chat template or with one that cannot show results of tools, an environment
    without a range of returns, and settings that only single turns support.
    """
    s, P = config.sampling, config.prompts.per_step
    if judge.runner is None:
        assert judge.reward is not None
        warn_of_calls_left_out(tokenizer, itertools.chain(*asked))
        return OneTurn(judge.reward, tokenizer, P, s.group, max_tokens, tuple(s.stop_strings))
    environment = judge.runner.environment
    if not tokenizer.chat_templates and not environment.tokens:
        raise ValueError("an environment speaks in messages, and this tokenizer has no chat template; set "
                         "config.model.chat_template to one")
    if config.prompts.overlong == "truncate":
        raise ValueError("prompts.overlong='truncate' would cut the opening of an environment; set it to 'fail' or 'skip'")
    low, high = environment.returns
    if not (np.isfinite([low, high]).all() and low < high):
        raise ValueError(f"environment {environment.name!r} has returns=({low}, {high}), and a score is the share of "
                         "the way from the lowest to the highest one; give two finite numbers, such as returns=(0.0, 1.0)")
    return Dialogue(judge.runner, P, s.group, s.max_turns, s.turn_tokens, max_tokens, tokenizer, tuple(s.stop_strings),
                    s.observation_tokens, hears_tools(tokenizer, environment), describes_tools(tokenizer, environment))


def prompt_length(config: ConfigDict, asked: Sequence[Sequence[tasks.Problem]], tokenizer, max_positions: int,
                  encode: Encode = encode_problems, max_tokens: int = 0, length: Callable[..., int] = longest) -> int:
    """S, the tokens that every prompt is padded to: the configured limit, or the `length` of the problems to sample.

    `encode` turns problems into token ids; `max_tokens`: of completions, 0: those of training.

    Raises:
      ValueError: prompt and completion together are longer than a published model allows.
    """
    S, T = config.prompts.max_tokens, max_tokens or config.sampling.max_tokens
    S = S or max(length(side, tokenizer, encode=encode) for side in asked if len(side))
    check_positions(config, S, T, max_positions)
    return S


def read_length(reads: Reads, problems: Sequence[tasks.Problem], tokenizer, encode: Encode, length: Callable[..., int]) -> int:
    """Most tokens that are read in place of prompts; the `length` of what `reads` shows in place of these problems."""
    if isinstance(reads, int):
        return reads
    shown = [one for i in range(len(problems)) if (one := reads(problems[i])) is not None]
    return length(shown, tokenizer, encode=encode) if shown else 0


def check_positions(config: ConfigDict, prompt_tokens: int, max_tokens: int, max_positions: int) -> None:
    """Raises ValueError if what is read and written is together longer than a published model allows."""
    if config.model.path and (both := prompt_tokens + max_tokens) > max_positions:
        raise ValueError(f"prompts of up to {prompt_tokens} tokens and completions of up to {max_tokens} make {both}, but the "
                         f"model was made for {max_positions}; lower sampling.max_tokens, or prompts.max_tokens with "
                         "prompts.overlong=skip")


def stop_ids(tokenizer, stop_strings) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's, and stop strings of one token. Longer stop strings are cut afterwards."""
    one_token = [ids[0] for ids in map(tokenizer.encode, stop_strings) if len(ids) == 1]
    return tuple(dict.fromkeys([*tokenizer.stop_ids, *one_token]))
