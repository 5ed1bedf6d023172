"""The frozen models that `config.teacher` names: loaded beside the policy, and checked against its tokenizer."""
from collections.abc import Callable, Set
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm import recorders
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.tasks import Task, text_of
from jaxrl_llm.training import config as config_lib
from jaxrl_llm.training import offload
from jaxrl_llm.training.start import load_model
from jaxrl_llm.training.variants import check_there

_COMPARED = 64  # problems whose texts two tokenizers must read alike


def provided(config: ConfigDict) -> tuple[str, ...]:
    """The fields that teachers provide, if there are any."""
    return ("teacher_logprobs", "teacher_id") if config.teacher.path else ()


def make_recorders(config: ConfigDict, needs: Set[str], task: Task, tokenizer, mesh: Mesh, tokens: int,
                   scorer: Callable[[Transformer], Callable]) -> list[recorders.Recorder]:
    """The recorders of `config.teacher` that a method needs.

    `tokens`: maximum tokens of prompt and completion. `scorer(model)` makes its `logprobs(params, lora, rollouts)`; models of
    one architecture share it.

    Raises:
      ValueError: the number of teachers is not that of the tasks, a model reads texts as other tokens, or a model allows only
        shorter texts.
    """
    known: dict[ModelConfig, Callable] = {}
    made: list[recorders.Recorder] = []

    def load(path: str, key: str) -> tuple[Callable, Any]:
        model, weights = _loaded(config, path, key, task, tokenizer, mesh, tokens)
        if model.config not in known:
            known[model.config] = scorer(model)
        return known[model.config], weights

    def kept(recorder: recorders.Recorder) -> recorders.Recorder:
        return recorder._replace(given=offload.away(tuple(config_lib.parts(config.learner.offload)), "teacher", recorder.given))

    if {"teacher_logprobs", "teacher_id"} & needs:
        paths = config_lib.parts(config.teacher.path)
        if len(paths) not in (1, max(len(task.parts), 1)):
            raise ValueError(f"config.teacher.path names {len(paths)} teachers for {max(len(task.parts), 1)} tasks; give one "
                             "for all, or one for each in the order of config.task")
        scorers, weights = zip(*(load(path, "path") for path in paths))
        made.append(kept(recorders.teacher(scorers, weights, apart="teacher_id" in needs)))
    if "base_logprobs" in needs and config.teacher.base:
        made.append(kept(recorders.base_model(*load(config.teacher.base, "base"))))
    return made


def _loaded(config: ConfigDict, path: str, key: str, task: Task, tokenizer, mesh: Mesh, tokens: int) -> tuple[Transformer, Any]:
    """The model at a path with its weights on the mesh, after checking that it reads the policy's tokens."""
    check_there(path, f"config.teacher.{key}")
    m = config.model.copy_and_resolve_references()
    m.path = path
    own, model, weights = load_model(m, mesh)
    differing = next((text for text in _texts(task) if own.encode(text) != tokenizer.encode(text)), None)
    if differing is not None or own.eos_id != tokenizer.eos_id:
        what = "ends texts with another token" if differing is None else f"reads {differing[:80]!r} as other tokens"
        raise ValueError(f"config.teacher.{key}={path} {what} than the policy; take a model with the same tokenizer")
    if tokens > model.config.max_positions:
        raise ValueError(f"prompts and completions have up to {tokens} tokens together, and config.teacher.{key}={path} was "
                         f"made for {model.config.max_positions}; lower sampling.max_tokens or prompts.max_tokens")
    return model, weights


def _texts(task: Task) -> list[str]:
    """Prompts and answers of some problems."""
    problems = [task.train[number] for number in range(min(len(task.train), _COMPARED))]
    return [text for problem in problems for text in (text_of(problem), problem.answer)]
