"""What values of a configuration may be, before anything is loaded or compiled."""
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxrl_llm.engines.kinds import ENGINES
from jaxrl_llm.engines.prompts import OVERLONG
from jaxrl_llm.kernels.choice import SETS
from jaxrl_llm.methods.composition import Faults
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.setup.config import ROOMS
from jaxrl_llm.tools import key_values
from jaxrl_llm.tools.registry import unknown
from jaxrl_llm.tools.written import parts

OFFLOADABLE = ("optimizer", "reference", "teacher")
WAITS = ("auto", "yes", "no")
_AT_LEAST = {
    1: "steps prompts.per_step sampling.group sampling.max_tokens sampling.micro_batches sampling.max_turns "
       "sampling.turn_tokens sampling.max_draws learner.epochs learner.minibatches learner.micro_batches "
       "learner.max_skipped checkpoint.keep warmup.batch model.hidden_size model.num_layers "
       "model.num_heads model.mlp_size model.experts_per_token",
    0: "seed sampling.temperature sampling.top_k sampling.tensor sampling.observation_tokens sampling.max_group model.experts "
       "model.expert_size learner.packed_rows prompts.max_tokens warmup.steps warmup.loss warmup.learning_rate "
       "warmup.strays eval.problems eval.every checkpoint.every samples_every",
}


def check(config: ConfigDict) -> None:
    """Raises ValueError with all lines of `faults`, if there are any, before anything is loaded or compiled."""
    if found := faults(config):
        raise Faults(found)


def faults(config: ConfigDict) -> list[str]:
    """A line for each value of a resolved configuration that cannot work."""
    found = [*_numbers(config), *(line for room in ROOMS if hasattr(room, "check_keys") for line in room.check_keys(config))]
    found += [*_sampling(config.sampling), *_names(config)]
    return found or [*_new_model(config.model), *_division(config)]  # of numbers that are in their ranges


def _numbers(config: ConfigDict) -> Iterator[str]:
    """A line for each number outside its range; infinite ones are bounds that are never reached."""
    for least, keys in _AT_LEAST.items():
        yield from key_values.at_least(config, least, keys)
    yield from key_values.finite(config, "sampling.temperature warmup.learning_rate")
    yield from key_values.seconds(config, "reward_deadline environment_deadline")
    for name in ("environment_invalid", "warmup.strays"):
        if not 0 <= (value := key_values.value_of(config, name)) <= 1:
            yield f"config.{name} is {value}; give a share from 0 to 1"


def _names(config: ConfigDict) -> Iterator[str]:
    """A line for each unknown word, and for sizes beside a model that has its own."""
    yield from key_values.named(config, "prompts.overlong", OVERLONG)
    yield from (str(unknown("config.learner.offload", name, OFFLOADABLE)) for name in parts(config.learner.offload)
                if name not in OFFLOADABLE)
    yield from key_values.named(config, "environment_waits", WAITS)
    if ":" not in config.sampling.engine:
        yield from key_values.named(config, "sampling.engine", ("auto", *ENGINES))
    yield from key_values.named(config, "model.kernels", SETS)
    yield from key_values.named(config, "model.sizes", ("", *MODELS))
    if config.model.path and config.model.sizes:
        yield (f"config.model.path={config.model.path!r} has its own sizes; set config.model.sizes only for a new model, "
               "without a path")


def _sampling(s: ConfigDict) -> Iterator[str]:
    """A line for each value of `config.sampling` that leaves no text, or no distribution."""
    if not 0 < s.top_p <= 1:
        yield f"config.sampling.top_p is {s.top_p}; give more than 0 and at most 1 (1: all tokens)"
    if not 0 <= s.min_p < 1:
        yield f"config.sampling.min_p is {s.min_p}; give 0 or more and less than 1 (0: all tokens)"
    for text in s.stop_strings:
        if not isinstance(text, str) or not text:
            yield (f"config.sampling.stop_strings is {s.stop_strings!r}, of which {text!r} is no text that a completion could "
                   "end with; leave it out, or give a text of one character or more")


def _division(config: ConfigDict) -> Iterator[str]:
    """A line for each way in which the prompts of a step do not divide into parts."""
    P, learner = config.prompts.per_step, config.learner
    pieces = learner.minibatches * learner.micro_batches
    if learner.packed_rows and learner.micro_batches > 1:
        yield (f"learner.packed_rows={learner.packed_rows} and learner.micro_batches={learner.micro_batches} both set the "
               "micro-batch size; set learner.micro_batches=1")
    if P % config.sampling.micro_batches:
        yield (f"prompts.per_step={P} does not divide into sampling.micro_batches={config.sampling.micro_batches}; choose one "
               f"of {[n for n in range(1, P + 1) if P % n == 0]}")
    if P % pieces:
        yield (f"prompts.per_step={P} does not divide into learner.minibatches={learner.minibatches} x learner.micro_batches="
               f"{learner.micro_batches}; their product must be one of {[n for n in range(1, P + 1) if P % n == 0]}")


def _new_model(m: ConfigDict) -> Iterator[str]:
    """A line for each size of a model from scratch that does not divide."""
    if m.path or m.sizes:
        return
    if m.hidden_size % (2 * m.num_heads):
        yield (f"config.model.hidden_size is {m.hidden_size}, which config.model.num_heads={m.num_heads} do not share in even "
               f"widths; give a multiple of {2 * m.num_heads}, or another number of heads")
    if m.experts and m.experts_per_token > m.experts:
        yield (f"config.model.experts_per_token is {m.experts_per_token} of config.model.experts={m.experts}; give no more "
               "than there are")
    if m.experts and not m.expert_size and m.mlp_size % m.experts_per_token:
        yield (f"config.model.mlp_size is {m.mlp_size}, which config.model.experts_per_token={m.experts_per_token} do not "
               "share evenly; give a multiple, or set config.model.expert_size")
