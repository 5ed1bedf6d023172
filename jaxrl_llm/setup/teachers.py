"""The frozen models that `config.teacher` names: loaded beside the policy, and checked against its tokenizer."""
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.setup.start import open_model
from jaxrl_llm.setup.variants import check_there
from jaxrl_llm.tasks import Task, text_of
from jaxrl_llm.tools import written

_COMPARED = 64  # problems whose texts two tokenizers must read alike


def loader(config: ConfigDict, task: Task | None, tokenizer, mesh: Mesh, tokens: int,
           logprobs_of: Callable[[Transformer], Callable]) -> Callable[[str], list[tuple[Callable, Any]]]:
    """The function `(key) -> [(logprobs, weights)]` of the models at the paths of `config.teacher.KEY`.

    `tokens`: maximum tokens of prompt and completion. `logprobs_of(model)` makes its `logprobs(params, lora, rollouts)`; models
    of one architecture share it.

    The function raises ValueError if the number of models is not that of the tasks, a model reads texts as other tokens, or
    one allows only shorter texts.
    """
    known: dict[ModelConfig, Callable] = {}

    def load(task: Task, path: str, key: str) -> tuple[Callable, Any]:
        model, weights = _loaded(config, path, key, task, tokenizer, mesh, tokens)
        if model.config not in known:
            known[model.config] = logprobs_of(model)
        return known[model.config], weights

    def loaded(key: str) -> list[tuple[Callable, Any]]:
        assert task is not None
        paths, allowed = written.parts(config.teacher[key]), {1, max(len(task.parts), 1)} if key == "path" else {1}
        if len(paths) not in allowed:
            raise ValueError(f"config.teacher.{key} names {len(paths)} teachers for {max(allowed)} tasks; give one "
                             "for all, or one for each in the order of config.task")
        return [load(task, path, key) for path in paths]

    return loaded


def _loaded(config: ConfigDict, path: str, key: str, task: Task, tokenizer, mesh: Mesh, tokens: int) -> tuple[Transformer, Any]:
    """The model at a path with its weights on the mesh, after checking that it reads the policy's tokens."""
    check_there(path, f"config.teacher.{key}")
    m = config.model.copy_and_resolve_references()
    m.path, m.chat_template_kwargs = path, ""  # a teacher reads the policy's tokens
    own, model, read = open_model(m)
    differing = next((text for text in _texts(task) if own.encode(text) != tokenizer.encode(text)), None)
    if differing is not None or own.eos_id != tokenizer.eos_id:
        what = "ends texts with another token" if differing is None else f"reads {differing[:80]!r} as other tokens"
        raise ValueError(f"config.teacher.{key}={path} {what} than the policy; take a model with the same tokenizer")
    if tokens > model.config.max_positions:
        raise ValueError(f"prompts and completions have up to {tokens} tokens together, and config.teacher.{key}={path} was "
                         f"made for {model.config.max_positions}; lower sampling.max_tokens or prompts.max_tokens")
    return model, read(mesh, 0)


def _texts(task: Task) -> list[str]:
    """Prompts and answers of some problems."""
    problems = [task.train[number] for number in range(min(len(task.train), _COMPARED))]
    return [text for problem in problems for text in (text_of(problem), problem.answer)]
