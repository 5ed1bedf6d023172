"""The interface of filters and controllers: pure functions that a loop calls around the update.

A filter selects the prompts of a batch of rollouts that are worth an update; a controller turns observations (`FACTS`) into
the settings of the next step (`Settings`). To add one, write a keyword-only factory under `@prompt_filter` or `@controller`
into a file of this folder:

    @controller
    def warmer(*, rise: float = 0.01) -> Controller:
        return Controller(lambda temperature: jnp.float32(temperature), lambda t: {"temperature": t},
                          lambda t, facts: t + rise, facts=("rewards",), knobs=("temperature",))
"""
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, measured
from jaxrl_llm.tools import registry

State = Any

# Facts that a run lets controllers observe: all but the last after each step, the last after each held-out evaluation. A
# controller therefore reads either `score` alone or others; one that reads none observes every step. Rows of prompts are whole
# groups as they were sampled, some of which may not be valid. A step with nothing left to train on has only the first four.
FACTS = {
    "step": "i32[], the number of the step, from 0",
    "tried": "i32[N] of the training problems, rollouts that were sampled in this step, also those that a filter drops",
    "right": "i32[N], those of them that solve their problem",
    "reference_rates": "f32[K], shares of right rollouts of the `reference_ids` that a controller sets; NaN if not measured",
    "prompt_ids": "i32[P]",
    "rewards": "f32[P, G]",
    "solved": "bool[P, G], rollouts that solve their problem",
    "valid": "bool[P, G], rollouts that exist and were sampled in this step",
    "lengths": "i32[P, G], trained tokens of these",
    "entropy": "f32[], nats, mean over the sampled tokens of the distribution that they were drawn from",
    "rollouts": "`Rollouts` as they were learned from: groups may be cut into several rows",
    "params": "parameters after the step",
    "metrics": "f32[] by name, those of the step's updates; there are none where nothing was learned from",
    "score": "f32[], the held-out score",
}


# Arguments that a run passes to `init`, by name.
KNOWN = {
    "params": "parameters before the first step",
    "temperature": "float, the configured one",
    "prompts": "int, N, training problems",
    "shares": "`passes.Shares`, the task of each training problem and the weights of the tasks",
    "batch": "int, B, problems that are drawn at once",
    "group": "int, G, rollouts that a prompt gets at once",
    "max_group": "int, most rollouts of a prompt, where a method lets their number differ",
    "max_tokens": "int, T, of a completion at most",
    "embeddings": "f32[N, D], mean state of each training prompt under the first policy, see `sampling.embeddings`",
    "prompt_lengths": "i32[N], tokens of each training prompt; 0 for one that cannot be asked",
    "levels": "i32[N], the `Problem.level` of each training problem as a number from 0, see `tasks.loader.levels_of`",
    "seed": "u32[2], of the run's draws by controllers",
}


class Settings(NamedTuple):
    """Settings that a run reads from its controllers before each step; None: the configuration's value.

    Attributes:
      temperature: f32[], of the sampler and of the learner's log-probs. Held-out evaluations keep the configuration's.
      max_tokens: i32[], of a completion, from 1 to `sampling.max_tokens`; a completion that ends there has not stopped.
      token_limits: i32[N], the same of each training problem's completions; the lower of the two holds.
      max_turns: i32[], turns of the policy in a trajectory of an environment; at most `sampling.max_turns`.
      announced_turns: i32[], the first limit announced to the policy: after each turn a message gives the number of turns left;
        once these are used up, the messages count to `max_turns`; 0: no messages.
      spread: f32[], how strongly first tokens of a group avoid its earlier ones, see `engines.sampling.spread_out`.
      learning_rate: f32[], a factor of the schedule's rate.
      epochs: i32[], passes over the batch, 1 or more; at most those that are configured.
      prompt_weights: f32[N], weights of the training problems in the draw of batches, see `tasks.loader.drawn`. With several
        tasks each is multiplied by its task's weight over the number of its problems, see `tasks.loader.evenly`.
      prompt_ids: i32[B], problems of the next batch; ids below 0, and missing entries of a batch, are drawn by the weights.
      group_sizes: i32[B], rollouts of each of these, rounded up to a multiple of G, from G to `sampling.max_group`; other
        problems get G.
      reference_ids: i32[K], problems that get one group each before the batch, without training on them; ids below 0: none.
      reward_baseline: f32[], `extras["reward_baseline"]` of the rollouts, the baseline of replayed rollouts.
      tool_coef: f32[], weight of the reward for turns that call tools, `tool_bonus.tool_reward`, which is added to the rewards
        of sampled trajectories; there are none without tools.
      reference: parameters of the reference policy for `ref_logprobs`.
      fresh_optimizer: bool[], whether the optimiser's state is cleared before the updates of the batch; its schedule goes on.
      reset: bool[], read after evaluations: the policy becomes the reference, and the optimiser's state is reset.
    """

    temperature: Array | None = None
    max_tokens: Array | None = None
    token_limits: Array | None = None
    max_turns: Array | None = None
    announced_turns: Array | None = None
    spread: Array | None = None
    learning_rate: Array | None = None
    epochs: Array | None = None
    prompt_weights: Array | None = None
    prompt_ids: Array | None = None
    group_sizes: Array | None = None
    reference_ids: Array | None = None
    reward_baseline: Array | None = None
    tool_coef: Array | None = None
    reference: Any = None
    fresh_optimizer: Array | None = None
    reset: Array | None = None


class Filter(NamedTuple):
    """`keep(rollouts)`: bool[P], prompts that enter the batch.

    A trainer replaces the other prompts by further samples, or with `refills=False` trains on a smaller batch.

    With `per="rollout"` it is bool[P, G], rollouts that stay in the loss: apply it to their mask AFTER computing the
    advantages. `needs` names fields of `Rollouts`, or entries of its `extras`, that `keep` reads.
    """

    keep: Callable[[Rollouts], Array]
    needs: tuple[str, ...] = ("rewards",)
    per: str = "prompt"
    refills: bool = True


def without(rollouts: Rollouts, keep_PG: Array) -> Rollouts:
    """The rollouts with an empty mask where not kept; apply it AFTER computing the advantages.

    Dropped rollouts stay in the statistics of their group, but leave numerator and denominator of the loss; if all are dropped,
    it is 0.
    """
    return rollouts.replace(mask=rollouts.mask & keep_PG[..., None])


class Controller(NamedTuple):
    """`init(...) -> state`; `propose(state) -> settings by name`; `observe(state, facts by name) -> state`, all pure.

    `init` takes by name the values that the state depends on, if any, among those of `KNOWN`. States are pytrees of arrays,
    saved with a run.
    `facts` names the facts that `observe` reads: those of `FACTS`, and facts of prompts in the forest of a step. `knobs` names
    the settings that `propose` sets, see `Settings`. `begin(state) -> state`: at the beginning of a later phase of a run, which
    goes on with the states of the phase before.
    """

    init: Callable[..., State]
    propose: Callable[[State], dict[str, Any]]
    observe: Callable[[State, Mapping[str, Any]], State]
    facts: tuple[str, ...]
    knobs: tuple[str, ...]
    begin: Callable[[State], State] | None = None


FILTERS = registry.PartTable("filter", Filter)
CONTROLLERS = registry.PartTable("controller", Controller, pure=True)
controller = CONTROLLERS.enter


def prompt_filter(factory: registry.Factory | None = None, /, **facts: Any) -> registry.Factory:
    """Enters a factory of filters, whose `keep` gets measurements in float32, whatever the caller's dtype."""
    if factory is None:
        return functools.partial(prompt_filter, **facts)

    @functools.wraps(factory)
    def made(**hyper):
        inner = factory(**hyper)
        return inner._replace(keep=lambda rollouts: inner.keep(measured(rollouts)))

    return FILTERS.enter(made, **facts)
