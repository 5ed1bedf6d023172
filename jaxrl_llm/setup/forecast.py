"""Estimates of a run's needs on its devices, before its first step."""
import dataclasses
import warnings
from collections.abc import Set

import jax
import psutil
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.data.shapes import row_lengths
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.presets import DEVICES, Device
from jaxrl_llm.recorders.base import RECORDERS, RecorderKind, asked
from jaxrl_llm.replay.buffer import stored_bytes
from jaxrl_llm.setup import parts
from jaxrl_llm.setup.given import as_batches
from jaxrl_llm.setup.learners import optimizer_of
from jaxrl_llm.setup.run import Run
from jaxrl_llm.tools import written

# Prefixes of `device_kind`, longer ones first.
_KINDS = {"NVIDIA H100": "h100", "NVIDIA H200": "h200", "NVIDIA A100": "a100-80", "TPU v4": "v4", "TPU v5 lite": "v5e",
          "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e"}
_CERTAIN = 1.25  # estimates are within 25% of the compilers' allocations


def work_of(config: ConfigDict, prompt_tokens: int, needs: Set[str], critic: bool) -> plan.Work:
    """The step of a resolved configuration; `needs`, the fields of `Rollouts` that its method reads."""
    c, learner, made = config, config.learner, recorders_of(config, needs)
    parts_sampled = 1 if c.environment else c.sampling.micro_batches
    return plan.Work(c.prompts.per_step, c.sampling.group, prompt_tokens, c.sampling.max_tokens, learner.minibatches,
                     learner.micro_batches, parts_sampled, learner.epochs, c.model.dtype, c.model.remat, c.lora.rank,
                     passes=sum(one.passes for one in made), critic=critic and c.critic.kind == "separate",
                     average=bool(c.optimizer.ema), reference=any(one.copies for one in made) and not c.lora.rank,
                     offload=tuple(written.parts(learner.offload)),
                     optimizer=optimizer_of(c, c.optimizer.learning_rate, c.steps)[0], rows=learner.packed_rows,
                     row_tokens=row_lengths(prompt_tokens, c.sampling.max_tokens, c.sampling.group, c.mesh.seq)[-1],
                     int8_cache=c.model.int8_cache, slots=bool(c.environment) or c.sampling.engine == "slots",
                     replica=c.sampling.tensor)


def recorders_of(config: ConfigDict, needs: Set[str]) -> list[RecorderKind]:
    """The recorders, without those of critics, that a resolved configuration makes for these fields."""
    there = methods.provision.sampled() | parts.keys_of(config)
    return [RECORDERS[name] for name in asked(parts.recorded_needs(config, needs), there)]


def device_of(device: jax.Device) -> Device:
    """The published figures of a device, with its actual memory; a CPU's is its share of the host's memory."""
    known = next((name for kind, name in _KINDS.items() if device.device_kind.startswith(kind)), None)
    facts = DEVICES[known] if known else Device(device.device_kind, 0.0, float("nan"), float("nan"))
    if device.platform == "cpu":
        memory = psutil.virtual_memory().total / device.client.device_count()
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit", facts.memory) / plan.USABLE  # a limit is usable in full
    return Device(facts.name, memory, facts.flops, facts.bandwidth, measured=True)  # the compiler reports the actual needs


def taught(run: Run) -> tuple[float, list[tuple[str, str]]]:
    """Bytes on each device of the weights of other models, and their row of the head, if there are any."""
    leaves = [x for one in run.learner.measuring for x in jax.tree.leaves(one.given)]
    mine = sum(shard.data.nbytes for x in leaves if x.sharding.memory_kind != "pinned_host"
               for shard in x.addressable_shards[:1])
    said = f"{sum(x.size for x in leaves):,} weights, frozen, whose work is not among the operations"
    return mine, [("teachers", said)] if leaves else []


def replayed(run: Run) -> list[tuple[str, str]]:
    """The maximum size of a run's replay buffer, if it has one."""
    source, replay = run.source, parts.only(run.method, "replay")
    if replay is None:
        return []
    most = replay.most(len(source.task.train), source.prompts * source.stream.group)
    size = stored_bytes(most, source.stream.prompt_tokens, source.max_tokens)
    return [("replay buffer, at most", f"{most:,} rollouts, {size / 1e9:.3g} GB of the host's memory, twice while it changes")]


def critic_programs(run: Run) -> int:
    """Programs that update a run's critic: one for each shape of its batches; in packed rows for each length, and two more."""
    layout, estimator = run.learner.layout, run.learner.estimator
    if not estimator.has_critic:
        return 0
    packed = layout.placed is not None and estimator.turn_critic is None  # a critic of turns reads recorded states
    return max(one.shapes for one in layout.update_programs) + 2 if packed else run.source.ladders.programs


def replay_programs(run: Run) -> int:
    """Programs that update on replayed batches, where these have an objective of their own."""
    again = run.learner.rehearsal
    return 0 if again is None or again.layout is run.learner.layout else sum(one.shapes for one in again.layout.update_programs)


def forecast(run: Run) -> list[tuple[str, str]]:
    """Rows for the head of a run: memory per device and useful operations of a step at maximum lengths, and programs.

    Raises ValueError: the run does not fit its accelerators by more than the error of the estimate; the message has advice. A
    smaller excess, and any on CPUs, whose memory swap extends, is a warning.
    """
    c, mesh, config = run.learner.policy.model.config, run.learner.mesh, as_batches(run.config, run.source)
    own, critic = mesh.local_devices[0], run.learner.estimator.value_targets is not None
    device = device_of(own)
    beside, teachers = taught(run)
    w = dataclasses.replace(work_of(config, run.source.ladders.prompt_tokens[-1], run.needs, critic),
                            teachers=(lambda mesh: beside) if teachers else None)
    estimate = plan.estimate(c, w, mesh.shape)
    if not estimate.fits(device):
        refusal = plan.refusal(c, w, device, mesh.size, plan.placed(c, w, device, mesh.size, mesh.shape))
        if own.platform != "cpu" and estimate.peak > _CERTAIN * plan.USABLE * device.memory:
            raise ValueError(refusal)
        warnings.warn(refusal, RuntimeWarning, stacklevel=2)
    operations, layout = sum(plan.step_flops(c, w).values()), run.learner.layout
    counts = {"updates": sum(one.shapes for one in layout.update_programs),
              "updates on replayed batches": replay_programs(run), "updates of the critic": critic_programs(run),
              "log-probs": sum(one.shapes for one in layout.logprob_programs)}
    programs = [f"{count} of {what}" for what, count in counts.items() if count]
    rows = [("memory per device, estimated", f"{estimate.updating / 1e9:.2f} GB updating, {estimate.sampling / 1e9:.2f} GB "
             f"sampling, of {device.memory / 1e9:.1f}"), ("operations per step", f"{operations / 1e12:.3g} TFLOP"),
            ("programs to compile, at most", ", ".join(programs)), *teachers, *replayed(run)]
    seconds = sum(plan.ideal_seconds(c, w, mesh.shape, device).values())
    return rows if seconds != seconds else [*rows, ("seconds per step, at least", f"{seconds:.2f} (bfloat16 peak)")]
