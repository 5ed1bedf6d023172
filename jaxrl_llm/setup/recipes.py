"""Shared code of the files of configs/: one recipe for several published models and machines, sized by the memory plan."""
import dataclasses
import itertools

from ml_collections import ConfigDict

from jaxrl_llm.methods.provision import needs_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.presets import MODELS, Device, parse_devices
from jaxrl_llm.setup import forecast
from jaxrl_llm.setup.check import check
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.numbers import method_parts
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.variants import MACHINES, PUBLISHED, TEACHERS, parse
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import one_of
from jaxrl_llm.values import features

CPU = Device("cpu", 16e9, float("nan"), float("nan"))  # a laptop's memory
RANK = 32  # rank of adapters, if there is no room to train all weights


def machine_of(name: str) -> tuple[Device, int]:
    """Device and number of a row of `MACHINES`."""
    return (CPU, 1) if one_of("machine", name, MACHINES) == "cpu" else parse_devices(name)


def work_of(config: ConfigDict, architecture: ModelConfig) -> plan.Work:
    """The step that a configuration describes, for a model that need not exist on this machine.

    The weights of a published teacher are counted as they are kept: in float32, sharded like the policy's. Raises ValueError if
    the length of prompts would be read from the task.
    """
    method = method_of(config)
    config = resolve(config, method.defaults)
    check(config)
    if not config.prompts.max_tokens:
        raise ValueError("config.prompts.max_tokens=0 would be read from the task; give the longest prompt to plan for")
    estimator, objective = method_parts(config, method, features.feature_size(architecture.hidden_size))
    work = forecast.work_of(config, config.prompts.max_tokens, needs_of(method, estimator, objective),
                            critic=estimator.value_targets is not None)
    rows = {path: row for row, path in TEACHERS.values()}
    taught = [MODELS[rows[path]] for path in written.parts(config.teacher.path) if path in rows]

    def beside(mesh):
        return sum(4 * plan.weights_per_device(one, mesh) for one in taught)

    return dataclasses.replace(work, teachers=beside if taught else None)


def sized(c: ConfigDict, variant: str, *, taught: bool = False) -> ConfigDict:
    """The recipe `c` for a model on a machine, `variant` being e.g. `qwen2.5_1.5b-h100-8`.

    On accelerators a step has 64 prompts, in bfloat16; on a CPU 100 steps have 4 prompts and completions of up to 256 tokens.
    Batches are split, and weights sharded, until `planning.plan` finds a fit with its margin. Trajectories of an environment
    are alive together: if they do not fit, a step has 32 or 16 prompts. If training all weights does not fit, adapters are
    trained. Adapters, and the few prompts of a CPU, get ten times the learning rate. Later changes on the command line are not
    planned again. `taught`: whether the model is taught by its model in `TEACHERS`. Raises ValueError: unknown variants, and
    models that do not fit the machine even then.
    """
    model, machine = parse(variant)
    (device, count), (row, c.model.path) = machine_of(machine), PUBLISHED[model]
    if taught:
        c.teacher.path = TEACHERS[model][1] if model in TEACHERS else ""
    if machine == "cpu":
        c.steps, c.prompts.per_step, c.sampling.max_tokens = min(c.steps, 100), 4, min(c.sampling.max_tokens, 256)
        c.eval.problems = min(c.eval.problems, 16)
    else:
        c.prompts.per_step, c.model.dtype = 64, "bfloat16"
    fewer = (1, 2, 4) if c.environment and machine != "cpu" else (1,)
    most = c.prompts.per_step
    for rank, parts in itertools.product((0, RANK), fewer):
        c.lora.rank, c.prompts.per_step = rank, most // parts
        changes, _, estimate = plan.remedies(MODELS[row], work_of(c, MODELS[row]), device, count)
        if estimate is not None:
            c.update_from_flattened_dict(changes)
            c.mesh.fsdp, c.mesh.tensor = estimate.mesh["fsdp"], estimate.mesh["tensor"]
            c.optimizer.learning_rate *= 10 if rank or machine == "cpu" else 1
            return c
    raise ValueError(f"{model} does not fit {machine}, even where adapters alone are trained; take a smaller model, a larger "
                     f"machine of {', '.join(MACHINES)}, or a recipe with shorter completions")
