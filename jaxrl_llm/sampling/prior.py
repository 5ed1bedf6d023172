"""Expected rewards of prompts before they are sampled: the prior of V0.5, and the basis of rollout budgets."""
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_collections import ConfigDict

from jaxrl_llm import parallel
from jaxrl_llm.control import Controller, prompt_average
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.engines.prompts import pad
from jaxrl_llm.learning.policy import Capture, Policy
from jaxrl_llm.maths import masked
from jaxrl_llm.tasks import text_of
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tools import key_values
from jaxrl_llm.values import buffer, encoder, features, probe, v0

# Two are control conditions. "shuffled": every prompt gets the probe's prediction for its neighbour in the (shuffled) batch.
# "oracle": the policy samples further completions, which cost tokens and are not trained on; nothing is predicted, and the
# topology `oracle` asks for them.
SOURCES = ("moving_average", "shuffled", "probe", "v0", "oracle")
_WINDOW = 512   # number of latest groups that the probe is fitted to
_CONTEXT = 256  # number of latest groups that V0 reads, as in the paper
Facts = dict[str, Any]


class Prior(NamedTuple):
    """Predicts the reward of newly drawn prompts, by a controller of the run that is read within a step.

    The `controller` learns the state and proposes no settings. read(rows, params, lora) -> facts `[P, ...]` of problems and
    their token ids, on the host, including `prompt_ids i32[P]`; the controller also observes the facts of sampled prompts.
    predict(state, facts) -> f32[P], the expected reward; NaN: unknown.
    """

    controller: Controller
    read: Callable[[Sequence[tuple[Problem, list[int]]], Any, Any], Facts]
    predict: Callable[[Any, Facts], Array]
    successes: bool = False


def make(config: ConfigDict, policy: Policy, prompts: int, prompt_tokens: int, capture: Capture) -> Prior:
    """The prior named by `config.prior`, for a task with `prompts` training prompts; a probe reads the states of `capture`.

    It predicts rewards, or for a budget the share of rollouts that solve their problem.
    """
    prior = _make(config, policy, prompts, prompt_tokens, capture)
    return of_successes(prior) if config.budget.utility else prior


def of_successes(prior: Prior) -> Prior:
    """The prior with right and wrong in the place of rewards, which may contain other terms or have another range."""
    one = prior.controller
    return prior._replace(controller=one._replace(
        facts=tuple("solved" if fact == "rewards" else fact for fact in one.facts),
        observe=lambda state, facts: one.observe(state, {**facts, "rewards": jnp.asarray(facts["solved"], jnp.float32)})),
        successes=True)


def _make(config: ConfigDict, policy: Policy, prompts: int, prompt_tokens: int, capture: Capture) -> Prior:
    source = config.prior.source
    if source in ("probe", "shuffled"):
        prior = of_probe(policy, capture, prompt_tokens)
        return prior if source == "probe" else prior._replace(predict=lambda *arguments: jnp.roll(prior.predict(*arguments), 1))
    if source == "v0":
        return of_v0(config.prior.weights, config.prior.encoder)
    if source == "oracle":
        return Prior(learner(lambda: (), lambda state, facts: state), lambda rows, params, lora: {"prompt_ids": ids_of(rows)},
                     lambda state, facts: jnp.full(len(facts["prompt_ids"]), jnp.nan))
    return of_averages(prompts)


def learner(init: Callable[[], Any], observe: Callable[[Any, Mapping[str, Any]], Any], *facts: str) -> Controller:
    """A controller without settings; it observes the results of prompts and these further facts of them."""
    return Controller(init, lambda state: {}, observe, facts=("prompt_ids", "rewards", "valid", *facts), knobs=())


def ids_of(rows) -> np.ndarray:
    return np.array([problem.id for problem, _ in rows], np.int32)


def of_averages(prompts: int) -> Prior:
    """The moving average of each prompt's rewards, see `control.prompt_average`."""
    def observe(state, facts):
        valid = facts["valid"]
        return prompt_average.observe(state, Rollouts(
            mask=valid[..., None], valid=valid, rewards=facts["rewards"], prompt_ids=facts["prompt_ids"]))

    return Prior(learner(lambda: prompt_average.empty(prompts), observe),
                 lambda rows, params, lora: {"prompt_ids": ids_of(rows)},
                 lambda state, facts: prompt_average.predict(state, facts["prompt_ids"]))


def of_probe(policy: Policy, capture: Capture, prompt_tokens: int) -> Prior:
    """Ridge regression from the policy's own states at the end of the prompt to the mean reward of its group.

    It is refitted after every batch to the latest groups; predictions are clipped to the range of their mean rewards.
    """
    fitted = probe.make("ridge", sizes=(policy.model.config.hidden_size,), low=-jnp.inf, high=jnp.inf)

    @jax.jit
    def look(params, lora, tokens, mask):
        last = features.last_tokens(mask, capture.pool)
        pooled = policy.model.hidden_states(params, tokens, mask, lora=lora, pool=lambda x: features.pooled(x, last))[2]
        return pooled[capture.layer]

    def init():
        row = {"x": jnp.zeros(policy.model.config.hidden_size), "y": jnp.zeros(())}
        return {"window": buffer.empty(_WINDOW, row), "probe": fitted.blank(_WINDOW, row["x"].size)}

    def read(rows, params, lora):
        ids = ids_of(rows)
        batch = pad([tokens for _, tokens in rows], ids, prompt_tokens)
        placed = parallel.put((batch.tokens, batch.mask), parallel.replicated(policy.mesh))
        return {"prompt_ids": ids, "features": parallel.fetch(look(params, lora, *placed))}

    def predict(state, facts):
        window = state["window"]
        label, some = window.rows["y"], window.real.any()
        low, high = (pick(jnp.where(window.real, label, fill)) for pick, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
        return jnp.where(some, jnp.clip(fitted.predict(state["probe"], facts["features"]), low, high), 0.5)

    def observe(state, facts):
        valid = facts["valid"]
        rows = {"x": facts["features"], "y": masked.mean(facts["rewards"], valid, axis=1)}
        window = buffer.append(state["window"], jax.tree.map(lambda x: x[:, None], rows), valid.any(axis=1)[:, None])
        return {"window": window, "probe": fitted.fit(window.rows["x"], window.rows["y"], window.real, window.group)}

    return Prior(learner(init, observe, "features"), read, predict)


def of_v0(weights: str, encoder_path: str) -> Prior:
    """V0 with the current policy's latest groups as its context; rewards are clipped to [0, 1].

    Raises ValueError: a path is missing, or the weights lack the adapter that turns the encoder's states into features.
    """
    if not weights or not encoder_path:
        raise ValueError(f"config.prior.source='v0' needs config.prior.weights (given: {weights!r}), a file of "
                         f"experiments/pretrain_value.py, and config.prior.encoder ({encoder_path!r}), the model that it was "
                         "trained with")
    model, params = v0.load(weights)
    if model.adapter is None:
        raise ValueError(f"{weights} holds a head without adapter; make one with experiments/pretrain_value.py --stage=adapter")
    encode_text = encoder.load(encoder_path).encode
    encode = jax.jit(functools.partial(model.encode, params))

    def read(rows, params, lora):
        del params, lora  # frozen; a prompt is read each time, as its padding, and so its rounding, is that of its batch
        return {"prompt_ids": ids_of(rows),
                "features": np.asarray(encode(*encode_text([text_of(problem) for problem, _ in rows])))}

    def observe(state, facts):
        outcomes = jnp.clip(masked.mean(facts["rewards"], facts["valid"], axis=1), 0, 1)
        return v0.remember(state, facts["features"], outcomes, facts["prompt_ids"], facts["valid"].any(axis=1))

    return Prior(learner(lambda: v0.empty_context(_CONTEXT, model.head.features), observe, "features"), read,
                 lambda state, facts: v0.judge(model, params, state, facts["features"], facts["prompt_ids"]))


@functools.partial(jax.jit, static_argnums=0)
def predict(prior: Prior, state, facts: Facts) -> Array:
    """f32[P], see `Prior`."""
    return prior.predict(state, facts)


def keys(c: ConfigDict) -> None:
    """Expected rewards of prompts."""
    c.prior = ConfigDict()             # methods that predict the reward of a prompt before they sample it
    c.prior.source = "moving_average"  # "moving_average" of rewards, "probe" on the policy's states, "v0", "shuffled", "oracle"
    c.prior.weights = ""               # weights of V0, from experiments/pretrain_value.py
    c.prior.encoder = ""               # the encoder that V0 was trained with


def check_keys(config: ConfigDict) -> Iterator[str]:
    """A line for each value that cannot work."""
    yield from key_values.named(config, "prior.source", SOURCES)
