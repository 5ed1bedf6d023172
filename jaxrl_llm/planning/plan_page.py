"""A plan as text: one step in detail, or models by hardware as a Markdown table."""
import math
from collections.abc import Mapping

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import plan
from jaxrl_llm.planning.presets import Device


def page(name: str, c: ModelConfig, w: plan.Work, device: Device, chosen: plan.Estimate) -> str:
    """Bytes by purpose, operations and least seconds by phase."""
    count = math.prod(chosen.mesh.values())
    active = "" if c.experts is None else f" ({plan.active_parameters(c):,} of them for each token)"
    lines = [f"{name}: {plan.parameters(c):,} weights{active} on {count} x {device.name}, {plan.named(chosen.mesh)}",
             f"one step: {w.prompts} prompts of {w.prompt_tokens} tokens x {w.group} completions of {w.completion_tokens}, "
             f"{w.dtype}, {w.minibatches} x {w.micro_batches} parts learned, {w.sampling_parts} sampled"
             + (f", {w.rows} packed rows of {w.row_tokens} tokens at a time" if w.rows else "")
             + (", layers computed again" if w.remat else ""), "", f"{'GB per device':32}{'updating':>10}{'sampling':>10}"]
    def row(label, *cells):
        return f"  {label:30}" + "".join(f"{cell:>10}" for cell in cells)
    def size(x):
        return f"{x / 1e9:.2f}"
    def counts(x):
        return x >= 5e6  # what would show as 0.00
    lines += [row(label, size(x), size(x)) for label, x in chosen.kept.items() if counts(x)]
    lines += [row(label, size(x), "") for label, x in chosen.update.items() if counts(x)]
    lines += [row(label, "", size(x)) for label, x in chosen.sampler.items() if counts(x)]
    lines += [row("or, when weights are published", "", size(x)) for x in [sum(chosen.publish.values())] if counts(x)]
    lines += [row("together", size(chosen.updating), size(chosen.sampling)),
              row(f"usable of {device.memory / 1e9:.0f}", *[size(plan.USABLE * device.memory)] * 2),
              f"{chosen.answer(device)}: {_room(chosen.margin(device))}", "",
              f"{'per step':32}{'PFLOP':>10}{'seconds >':>10}"]
    seconds, operations = plan.ideal_seconds(c, w, chosen.mesh, device), plan.step_flops(c, w)
    lines += [row(label, f"{x / 1e15:.1f}", f"{seconds[label]:.2f}") for label, x in operations.items() if x]
    lines += [row("together", f"{sum(operations.values()) / 1e15:.1f}", f"{sum(seconds.values()):.2f}"),
              "Seconds are lower bounds: bfloat16 peak and memory bandwidth, without communication."]
    return "\n".join(lines)


def _room(margin: float) -> str:
    if margin < 0:
        return f"{1 - margin:.1f} times the usable memory is needed"
    return f"{margin:.1%} of the usable memory is left"


def table(models: Mapping[str, tuple[ModelConfig, plan.Work]], machines: Mapping[str, tuple[Device, int]]) -> str:
    """One row per model and machine, with the changes that make it fit; Markdown."""
    rows = [("model", "weights", "devices", "data x fsdp x tensor", "changed", "GB updating", "GB sampling", "left",
             "seconds >"), ("---",) * 9]
    for name, (c, w) in models.items():
        for machine, (device, count) in machines.items():
            changes, changed, chosen = plan.remedies(c, w, device, count)
            active = "" if c.experts is None else f", {plan.active_parameters(c) / 1e9:.2f}e9 active"
            case = (name, f"{plan.parameters(c) / 1e9:.2f}e9{active}", f"{machine} ({count})")
            if chosen is None:
                rows.append((*case, "no", "", "", "", "", ""))
                continue
            seconds = sum(plan.ideal_seconds(c, changed, chosen.mesh, device).values())
            rows.append((*case, " x ".join(map(str, chosen.mesh.values())),
                         ", ".join(f"{key}={value}" for key, value in changes.items()),
                         f"{chosen.updating / 1e9:.1f}", f"{chosen.sampling / 1e9:.1f}",
                         f"{chosen.margin(device):.0%}{' (tight)' * (chosen.answer(device) == 'tight')}", f"{seconds:.1f}"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
