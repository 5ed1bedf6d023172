"""What values of a configuration may be, before anything is loaded or compiled."""
from ml_collections import ConfigDict

from jaxrl_llm.engines.kinds import ENGINES
from jaxrl_llm.engines.prompts import OVERLONG
from jaxrl_llm.kernels.choice import SETS
from jaxrl_llm.planning.presets import MODELS
from jaxrl_llm.setup.config import ROOMS
from jaxrl_llm.tools import key_values
from jaxrl_llm.tools.registry import one_of
from jaxrl_llm.tools.written import parts

OFFLOADABLE = ("optimizer", "reference", "teacher")
WAITS = ("auto", "yes", "no")
_AT_LEAST = {
    1: "steps prompts.per_step sampling.group sampling.max_tokens sampling.micro_batches sampling.max_turns "
       "sampling.turn_tokens sampling.max_draws learner.epochs learner.minibatches learner.micro_batches "
       "learner.max_skipped eval.problems checkpoint.keep warmup.batch model.hidden_size model.num_layers "
       "model.num_heads model.mlp_size model.experts_per_token",
    0: "seed sampling.temperature sampling.top_k sampling.tensor sampling.observation_tokens sampling.max_group model.experts "
       "model.expert_size learner.packed_rows prompts.max_tokens warmup.steps warmup.loss warmup.learning_rate "
       "warmup.strays eval.every checkpoint.every samples_every",
}


def check(config: ConfigDict) -> None:
    """Raises ValueError for values that cannot work, before anything is loaded or compiled."""
    _check_numbers(config)
    for room in ROOMS:
        if hasattr(room, "check_keys"):
            room.check_keys(config)
    _check_sampling(config.sampling)
    _check_new_model(config.model)
    one_of("config.prompts.overlong", config.prompts.overlong, OVERLONG)
    for name in parts(config.learner.offload):
        one_of("config.learner.offload", name, OFFLOADABLE)
    one_of("config.environment_waits", config.environment_waits, WAITS)
    if ":" not in config.sampling.engine:
        one_of("config.sampling.engine", config.sampling.engine, ("auto", *ENGINES))
    one_of("config.model.kernels", config.model.kernels, SETS)
    one_of("config.model.sizes", config.model.sizes, ("", *MODELS))
    if config.model.path and config.model.sizes:
        raise ValueError(f"config.model.path={config.model.path!r} has its own sizes; set config.model.sizes only for a new "
                         "model, without a path")
    if config.learner.packed_rows and config.learner.micro_batches > 1:
        raise ValueError(f"learner.packed_rows={config.learner.packed_rows} and learner.micro_batches="
                         f"{config.learner.micro_batches} both set the micro-batch size; set learner.micro_batches=1")
    P, pieces = config.prompts.per_step, config.learner.minibatches * config.learner.micro_batches
    if P % config.sampling.micro_batches:
        raise ValueError(f"prompts.per_step={P} does not divide into sampling.micro_batches={config.sampling.micro_batches}; "
                         f"choose one of {[n for n in range(1, P + 1) if P % n == 0]}")
    if P % pieces:
        raise ValueError(
            f"prompts.per_step={P} does not divide into learner.minibatches={config.learner.minibatches} x "
            f"learner.micro_batches={config.learner.micro_batches}; their product must be one of "
            f"{[n for n in range(1, P + 1) if P % n == 0]}")


def _check_numbers(config: ConfigDict) -> None:
    """Raises ValueError for numbers outside their range, of which infinite ones are bounds that are never reached."""
    for least, keys in _AT_LEAST.items():
        key_values.at_least(config, least, keys)
    key_values.finite(config, "sampling.temperature warmup.learning_rate")
    key_values.seconds(config, "reward_deadline environment_deadline")
    for name in ("environment_invalid", "warmup.strays"):
        if not 0 <= (value := key_values.value_of(config, name)) <= 1:
            raise ValueError(f"config.{name} is {value}; give a share from 0 to 1")


def _check_sampling(s: ConfigDict) -> None:
    """Raises ValueError for values of `config.sampling` that leave no text, or no distribution."""
    if not 0 < s.top_p <= 1:
        raise ValueError(f"config.sampling.top_p is {s.top_p}; give more than 0 and at most 1 (1: all tokens)")
    if not 0 <= s.min_p < 1:
        raise ValueError(f"config.sampling.min_p is {s.min_p}; give 0 or more and less than 1 (0: all tokens)")
    for text in s.stop_strings:
        if not isinstance(text, str) or not text:
            raise ValueError(f"config.sampling.stop_strings is {s.stop_strings!r}, of which {text!r} is no text that a "
                             "completion could end with; leave it out, or give a text of one character or more")


def _check_new_model(m: ConfigDict) -> None:
    """Raises ValueError for sizes of a model from scratch that do not divide."""
    if m.path or m.sizes:
        return
    if m.hidden_size % (2 * m.num_heads):
        raise ValueError(f"config.model.hidden_size is {m.hidden_size}, which config.model.num_heads={m.num_heads} do not "
                         f"share in even widths; give a multiple of {2 * m.num_heads}, or another number of heads")
    if m.experts and m.experts_per_token > m.experts:
        raise ValueError(f"config.model.experts_per_token is {m.experts_per_token} of config.model.experts={m.experts}; give "
                         "no more than there are")
    if m.experts and not m.expert_size and m.mlp_size % m.experts_per_token:
        raise ValueError(f"config.model.mlp_size is {m.mlp_size}, which config.model.experts_per_token={m.experts_per_token} "
                         "do not share evenly; give a multiple, or set config.model.expert_size")
