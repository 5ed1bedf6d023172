"""What a compiled program computes and moves, operation by operation, and the seconds that follow from a device's peaks.

`cost_analysis()` of a compiled program counts a loop once and charges a gather for the whole table. Here a loop counts as often
as it runs, and slices, gathers and in-place updates count what they read and write. Operations are matrix products; bytes are
those of the device's main memory, on TPUs without arrays in a core's own memory.
"""
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.evaluation import flops
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.planning import hlo
from jaxrl_llm.planning.hlo import Instruction
from jaxrl_llm.planning.plan import Work
from jaxrl_llm.planning.presets import Device

_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
            "opt-barrier", "add-dependency", "async-update", "domain"}
_PARTS = {"dynamic-slice", "slice", "gather"}  # they read as much of their first operand as they return
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # number of the operand that they write into the first one
_KERNEL = 'custom_call_target="tpu_custom_call"'
_THROUGH = {"bitcast", "reshape", "get-tuple-element", "copy", "convert"}  # within a fusion, they pass on what they read


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
      name, source: its name in the program, and the traced operation that it came from.
      flops: operations of its matrix products.  read, written: bytes of main memory.
      times: how often it runs.
      kernel: whether it is one of the accelerator's kernels, written in Pallas.
    """

    name: str
    source: str
    flops: float
    read: float
    written: float
    times: int = 1
    kernel: bool = False

    @property
    def moved(self) -> float:
        """Bytes of all its runs."""
        return self.times * (self.read + self.written)

    def seconds(self, device: Device) -> float:
        """Seconds of all its runs, at the peak of compute or memory, whichever takes longer."""
        return max(self.times * self.flops / device.flops, self.moved / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of a program, and the seconds of its operations one after another."""

    flops: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0

    def with_layers(self, two: "Cost", layers: int) -> "Cost":
        """The cost of this number of layers, extrapolated from one (self) and two (`two`)."""
        return Cost(*(one + (layers - 1) * (other - one)
                      for one, other in zip(dataclasses.astuple(self), dataclasses.astuple(two))))


def cost(operations: Sequence[Operation], device: Device) -> Cost:
    """The sums of a program's operations."""
    return Cost(sum(one.times * one.flops for one in operations), sum(one.moved for one in operations),
                sum(one.seconds(device) for one in operations))


def operations(text: str, unknown_trips: int = 1, kernels: Mapping[str, tuple[float, float]] | None = None) -> list[Operation]:
    """The operations of a compiled program, `compiled.as_text()`.

    Of a conditional, the branch with an accelerator's kernel counts, else the one that moves most. `unknown_trips` is assumed
    for loops whose end depends on data. A kernel is opaque to the compiler: `kernels` gives by its name the operations of a
    call and the bytes that it reads more than once; the others count as they estimate themselves (`pl.CostEstimate`).
    Raises ValueError for a text that is not a compiled program.
    """
    computations, entry = hlo.computations(text)

    @functools.cache
    def inside(name: str) -> tuple[Operation, ...]:
        ops: list[Operation] = []
        shapes = {i.name: i for i in computations[name]}
        for i in computations[name]:
            if i.opcode == "while":
                known = hlo.trips(i, computations)
                times = unknown_trips if known is None else known
                ops += [dataclasses.replace(one, times=one.times * times) for one in inside(i.named("body")[0])]
            elif i.opcode == "conditional":
                branches = i.named("branch_computations", "true_computation", "false_computation")
                ops += max(map(inside, branches), key=lambda branch: (any(one.kernel for one in branch),
                                                                      sum(one.moved for one in branch)))
            elif i.opcode in ("call", "async-start"):
                ops += [one for called in i.named("to_apply", "calls") for one in inside(called)]
            elif i.opcode not in _NOTHING and not i.opcode.endswith("-done") and "AllocateBuffer" not in i.rest:
                read, written = _moved(i, shapes, computations)
                if kernel := i.opcode == "custom-call" and _KERNEL in i.rest:
                    count, again = _of_kernel(i, kernels or {})
                else:
                    count, again = _flops(i, shapes, computations), 0.0
                one = Operation(i.name, i.source, count, read + again, written, kernel=kernel)
                ops += [one] if one.flops or one.moved else []
        return tuple(ops)

    return list(inside(entry))


# --- bytes ------------------------------------------------------------------------------------------------------------------


def _moved(i: Instruction, shapes: Mapping[str, Instruction], computations) -> tuple[float, float]:
    """Bytes of main memory that an instruction reads and writes."""
    operands = [shapes[name] for name in i.operands if name in shapes]
    if i.opcode == "fusion":
        body = computations[i.named("calls")[0]]
        read = sum(min(_bytes(one), _read(body, n, computations)) for n, one in enumerate(operands) if _bytes(one))
        return read, min(_bytes(i), _written(body, body[-1], computations)) if _bytes(i) else 0.0
    if i.opcode.endswith("-start"):  # from one memory to the other; its result names both, of a slice the whole array first
        named = re.split(r"(?<=[})\]]), ", i.shape.lstrip("("))
        made = named[i.opcode == "slice-start"]
        read = hlo.size(made) if i.opcode == "slice-start" else _bytes(operands[0])
        return min(read, _bytes(operands[0])), hlo.size(made, main_memory=True)
    if i.opcode in _PARTS:
        whole = hlo.size(i.shape)
        return (whole if _bytes(operands[0]) else 0.0) + sum(map(_bytes, operands[1:])), _bytes(i)
    if i.opcode in _IN_PLACE:
        update = operands[_IN_PLACE[i.opcode]]
        return sum(map(_bytes, operands[1:])), hlo.size(update.shape) if _bytes(i) else 0.0
    if i.opcode in ("broadcast", "iota"):
        return 0.0, _bytes(i)
    return sum(map(_bytes, operands)), _bytes(i)


def _bytes(i: Instruction) -> float:
    return hlo.size(i.shape, main_memory=True)


def _read(body: Sequence[Instruction], number: int, computations) -> float:
    """Bytes that a fusion reads of its operand of this number."""
    own = next((i for i in body if i.opcode == "parameter" and i.rest.startswith(f"{number})")), None)
    return 0.0 if own is None else _used(body, own, computations)


def _used(body: Sequence[Instruction], one: Instruction, computations, *, in_place: bool = False) -> float:
    """Bytes that a fusion reads of an array: all of it, or only the results of its slices.

    `in_place`: whether it is the array that the fusion writes into, which is not read for the result itself.
    """
    total, whole = 0.0, hlo.size(one.shape)
    if one is body[-1]:
        return 0.0 if in_place else whole
    for user in body:
        for place, name in enumerate(user.operands):
            if name != one.name:
                continue
            if user.opcode in _PARTS and place == 0:
                total += hlo.size(user.shape)
            elif user.opcode in _IN_PLACE and place == 0:
                total += _used(body, user, computations, in_place=True)
            elif user.opcode in _THROUGH or _is_bitcast(user, computations):
                share = _used(body, user, computations, in_place=in_place) / max(hlo.size(user.shape), 1)
                total += share * whole
            elif user.opcode == "fusion":
                total += _read(computations[user.named("calls")[0]], place, computations)
            elif user.opcode != "tuple" or not in_place:
                return whole
    return min(total, whole)


def _is_bitcast(i: Instruction, computations) -> bool:
    """Whether a fusion within a fusion does nothing."""
    return i.opcode == "fusion" and all(one.opcode in ("parameter", "bitcast") for one in computations[i.named("calls")[0]])


def _written(body: Sequence[Instruction], root: Instruction, computations) -> float:
    """Bytes that the root of a fusion writes: the whole result, or the part updated in place."""
    by_name = {i.name: i for i in body}
    if root.opcode in _IN_PLACE:
        return hlo.size(by_name[root.operands[_IN_PLACE[root.opcode]]].shape)
    if root.opcode == "tuple":
        return sum(_written(body, by_name[name], computations) for name in root.operands)
    if root.opcode in ("bitcast", "copy", "convert") and (before := by_name[root.operands[0]]).opcode in _IN_PLACE:
        return _written(body, before, computations) * hlo.size(root.shape) / max(hlo.size(before.shape), 1)
    if root.opcode == "fusion":
        inner = computations[root.named("calls")[0]]
        return _written(inner, inner[-1], computations)
    return hlo.size(root.shape)


# --- products ---------------------------------------------------------------------------------------------------------------


def _flops(i: Instruction, shapes: Mapping[str, Instruction], computations) -> float:
    """Operations of the matrix products in an instruction, 2 for each multiply-add."""
    if i.opcode == "dot":
        left = hlo.dimensions(shapes[i.operands[0]].shape)
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        axes = [int(n) for n in summed[1].split(",") if n] if summed else []
        return 2 * math.prod(hlo.dimensions(i.shape)) * math.prod(left[axis] for axis in axes)
    if i.opcode == "convolution":
        return _convolution(i, *(hlo.dimensions(shapes[name].shape) for name in i.operands[:2]))
    if i.opcode in ("fusion", "map"):
        return sum(_flops(one, {j.name: j for j in body}, computations)
                   for body in (computations[name] for name in i.named("calls", "to_apply")) for one in body)
    return 0.0


def _of_kernel(i: Instruction, kernels: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    """Operations of a kernel's products, and bytes that it reads beyond its operands."""
    for name, cost in kernels.items():
        if name in i.source:
            return cost
    estimate = re.search(r'"cost_estimate":\{"flops":"?(\d+)', i.rest)
    return float(estimate[1]) if estimate else 0.0, 0.0


def _convolution(i: Instruction, left: Sequence[int], right: Sequence[int]) -> float:
    """A matrix product as TPUs write it: batches may be windows, most places of which are outside and do not count."""
    inputs, kernel, outputs = re.split(r"_|->", re.search(r"dim_labels=([\w?>-]+)", i.rest)[1])
    out = hlo.dimensions(i.shape)
    total = 2.0 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernel.index("i")]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", i.rest) or ["", ""])[1]))
    for n, axis in enumerate(sorted(label for label in outputs if label.isdigit())):
        def at(name, fallback):
            return window[name].split("x")[n] if name in window else fallback
        low = int(at("pad", "0_0").split("_")[0])
        strides = [int(at(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate")]
        total *= _taps(left[inputs.index(axis)], right[kernel.index(axis)], out[outputs.index(axis)], low, *strides)
    return total


def _taps(size: int, window: int, out: int, low: int, stride: int, dilated: int, spread: int) -> int:
    """Number of pairs of an output and a place of its window that meet the input and not padding."""
    def meets(place: int) -> bool:
        return 0 <= place <= (size - 1) * dilated and place % dilated == 0
    return sum(meets(o * stride + k * spread - low) for o in range(out) for k in range(window))


# --- the least --------------------------------------------------------------------------------------------------------------


class Least(NamedTuple):
    """The minimum of a phase: operations of useful products, and bytes that have to be moved once."""

    flops: float
    moved: float

    def seconds(self, device: Device) -> float:
        return max(self.flops / device.flops, self.moved / device.bandwidth)


def decode_least(c: ModelConfig, w: Work) -> Least:
    """A step of P G rows that see S + T positions: weights (only experts that rows are sent to) and all caches once."""
    rows, seen = w.prompts * w.group, w.prompt_tokens + w.completion_tokens
    products = 2 * rows * flops.matmul_parameters(c) + rows * flops.attention_flops(c, 1, before=seen - 1)
    experts = None if c.experts is None else min(c.experts.count, rows * c.experts.per_token)
    places = sum(c.places(w.prompt_tokens, c.window)) + w.group * sum(c.places(w.completion_tokens, c.window))
    caches = w.cached_token(c) * w.prompts * places
    return Least(products, w.itemsize * flops.matmul_parameters(c, experts=experts) + caches)


pages_least = decode_least  # a step of the engine with paged caches: no least is different


def slots_least(c: ModelConfig, w: Work, data: int = 1, tensor: int = 1) -> Least:
    """As `decode_least`, of rows that have their prompts in their own caches, on one device of `data` x `tensor`."""
    whole = decode_least(c, dataclasses.replace(w, prompts=w.prompts * w.group // data, group=1))
    return Least(whole.flops / tensor, whole.moved / tensor)


def prefill_least(c: ModelConfig, w: Work) -> Least:
    """P prompts of S tokens: weights of the layers once, and the caches written."""
    weights, tokens = flops.matmul_parameters(c, unembedding=False), w.prompts * w.prompt_tokens
    products = 2 * weights * tokens + w.prompts * flops.attention_flops(c, w.prompt_tokens)
    return Least(products, w.itemsize * _whole(c, unembedding=False) + w.cached_token(c) * c.num_layers * tokens)


def layer_least(c: ModelConfig, w: Work) -> Least:
    """Forward and backward pass of one layer: its weights in float32 once in each direction, and their gradients once."""
    useful = flops.update_flops(c, w.prompt_tokens, [w.completion_tokens] * w.group)
    logits = 6 * c.vocab_size * c.hidden_size * w.completion_tokens * w.group
    return Least(w.prompts * (useful - logits) / c.num_layers, 12 * _whole(c, unembedding=False) / c.num_layers)


def update_least(c: ModelConfig, w: Work) -> Least:
    """An update of all weights: float32, once in each direction; gradients and both moments of AdamW written and read."""
    useful = flops.update_flops(c, w.prompt_tokens, [w.completion_tokens] * w.group)
    table = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return Least(w.prompts * useful, (8 + 8 + 24) * (_whole(c, unembedding=False) + table))


def _whole(c: ModelConfig, *, unembedding: bool) -> float:
    return flops.matmul_parameters(c, unembedding=unembedding, experts=None if c.experts is None else c.experts.count)
