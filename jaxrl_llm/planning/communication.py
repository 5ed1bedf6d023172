"""Bytes that a step sends between devices: as counted in its compiled programs, and the minimum for a mesh.

All figures are bytes that one device sends, by the ring algorithms: of a result of B bytes over n devices, gathering sends
(n-1)/n B; reducing and scattering B sends as much; reducing B everywhere sends both.
"""
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import jax

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.mesh import shards_of
from jaxrl_llm.parallel.rules import PIECES, axes_of, path_name, spec_of
from jaxrl_llm.planning import hlo
from jaxrl_llm.planning.plan import Bytes, Work

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_STATISTICS = 4  # of a token's logits, float32: largest, sum of exponentials, the token's own, sum for the entropy


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Attributes:
      kind: of `KINDS`.
      size: bytes of its result on one device.
      group: n, number of devices that take part in it together.
      times: executions in one run of the program: the product of the trip counts of the loops around it.
      source: the operation of the traced program that it came from.
    """

    kind: str
    size: float
    group: int
    times: int
    source: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one run of the program."""
        n = self.group
        share = {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n, "all-to-all": (n - 1) / n,
                 "collective-permute": 1 if n > 1 else 0}[self.kind]
        return self.times * self.size * share


def _group(attributes: str, devices: int) -> int:
    """Devices of one group, from `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['a'=2,'b'=4] {'b'}`; `{}` is all of them."""
    if match := re.search(r"source_target_pairs=\{(.*?\})?\}", attributes):
        return 1 if all(a == b for a, b in re.findall(r"(\d+),(\d+)", match[0])) else 2
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])  # 'a':(2)4 is the 4 within an axis that come after 2
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(match[1].split(","))
    return devices


def collectives(text: str, unknown_trips: int | None = None) -> list[Collective]:
    """The collectives of a compiled program, `compiled.as_text()`.

    The contents of a loop count as often as it runs. Of a conditional, the branch that sends most counts. A collective that is
    started and awaited separately counts once.

    Args:
      text: the program.
      unknown_trips: number of iterations to assume for loops whose end depends on data.
    Raises ValueError: such a loop has collectives and `unknown_trips` is None; or the text is not a compiled program.
    """
    computations, entry = hlo.computations(text)
    devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))

    @functools.cache
    def inside(name: str) -> tuple[Collective, ...]:
        body, ops = computations[name], []
        by_name = {i.name: i for i in body}
        for i in body:
            if i.opcode in KINDS:
                ops.append(Collective(i.opcode, hlo.size(i.shape), _group(i.rest, devices), 1, i.source))
            elif i.opcode.removesuffix("-done") in KINDS:  # it has the result; who takes part is said where it was started
                start = next(by_name[word] for word in re.findall(r"[\w.\-]+", i.rest) if word in by_name)
                kind = i.opcode.removesuffix("-done")
                ops.append(Collective(kind, hlo.size(i.shape), _group(start.rest, devices), 1, start.source))
            elif i.opcode == "while":
                repeated = inside(i.named("body")[0]) + inside(i.named("condition")[0])
                trips = hlo.trips(i, computations) if repeated else 0
                trips = unknown_trips if trips is None else trips
                if trips is None:
                    raise ValueError(f"the trip count of the loop {i.name} depends on data; give it as unknown_trips")
                ops += [dataclasses.replace(c, times=c.times * trips) for c in repeated]
            elif i.opcode == "conditional":
                branches = i.named("branch_computations", "true_computation", "false_computation")
                ops += max(map(inside, branches), key=lambda branch: sum(c.sent for c in branch))
            elif not i.opcode.endswith(("-done", "-update")) and i.opcode.removesuffix("-start") not in KINDS:
                ops += [c for called in i.named("calls", "to_apply", "called_computations") for c in inside(called)]
        return tuple(ops)

    return list(inside(entry))


def by_kind(collectives: list[Collective]) -> Bytes:
    """Bytes sent by every kind of collective."""
    return {kind: sum(c.sent for c in collectives if c.kind == kind) for kind in KINDS}


def _gathering(size: float, n: int) -> float:
    return (n - 1) / n * size


def _reducing(size: float, n: int) -> float:
    return 2 * (n - 1) / n * size


def _leaves(c: ModelConfig, mesh: Mapping[str, int]) -> Iterator[tuple[str, int, int, int]]:
    """Path and size of every parameter, and its number of shards over `tensor` and over `fsdp` with `seq`."""
    for path, leaf in jax.tree.leaves_with_path(Transformer(c).abstract_params()):
        name = path_name(path)
        axes = {axis for entry in spec_of(name, leaf.shape, mesh) for axis in axes_of(entry)}
        yield name, math.prod(leaf.shape), *(math.prod(mesh[axis] for axis in axes & {*over}) for over in (("tensor",), PIECES))


def update_minimum(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Least bytes that a device sends in one update (one minibatch), by purpose; d, f, t: sizes of data, fsdp and tensor.

    With `b` bytes per number in the compute dtype, L layers of n weights, N tokens of a micro-batch on a device of which M are
    completion tokens, m micro-batches:

      weights gathered: pieces live over fsdp, and every layer is read whole (over fsdp) by the forward and again by the
        backward pass, stored products or not: 2 m (f-1)/f b L n/t.
      gradients scattered: each shard's sum over fsdp goes to its device, for each micro-batch, in the compute dtype:
        m (f-1)/f b L n/t.
      gradients over data: pieces that were summed over fsdp and micro-batches, 2 (d-1)/d b L n/(t f). What is whole over fsdp
        (norms, what does not divide) is reduced over d f instead of d; norms and tables in float32.
      tables over fsdp: the embedding and the unembedding, each the cheaper way: the table is gathered, (f-1)/f b V D/t a use,
        and its float32 gradient scattered, (f-1)/f 4 V D/t; or tokens go to its pieces and back, (f-1) b N D forward and
        again backward.
      activations over tensor: the products with o and down are sums over tensor, and so are their cotangents at the entries of
        attention and MLP: 2 L forward and 2 L backward (with `remat` L more, for the entry of the MLP is computed again), one
        for the embedding, each 2 (t-1)/t b N D; one for the unembedding's cotangent, 2 (t-1)/t b M D.
      statistics of logits: a few float32 per completion token over tensor, since each device has its part of the vocabulary.

    Not counted: scalars (norm of the gradient, metrics) and masks. Tensor is taken to divide the heads. Raises ValueError:
    adapters are trained, whose communication differs.
    """
    if w.lora_rank:
        raise ValueError(f"lora_rank={w.lora_rank}: the least communication is known only for updates of all weights; give 0")
    d, f, t = mesh["data"], shards_of(mesh) // mesh["data"], mesh["tensor"]
    item, rows, m = w.itemsize, w.learned_at_once / (d * f), w.micro_batches
    completion = rows * w.group * w.completion_tokens
    tokens, D, L = completion + rows * w.prompt_tokens, c.hidden_size, c.num_layers
    gathered = scattered = reduced = tables = 0.0
    for name, size, over_tensor, over_fsdp in _leaves(c, mesh):
        whole, table = size / over_tensor, "embed" in name
        wide = 4 if table or "norm" in name else item
        reduced += _reducing(whole / over_fsdp * wide, d * f // over_fsdp)
        if not table:
            gathered += 2 * m * _gathering(whole * item, over_fsdp)
            scattered += m * _gathering(whole * wide, over_fsdp)
            continue
        uses = [tokens, completion] if c.tie_embeddings else [tokens] if name == "embed" else [completion]
        sent = [2 * (over_fsdp - 1) * use * D * item for use in uses]
        kept = _gathering(whole * 4, over_fsdp) + sum(min(_gathering(whole * item, over_fsdp), x) for x in sent)
        tables += m * min(sum(sent), kept)
    summed = (4 * L + L * w.remat + 1) * tokens + completion
    return {"weights gathered": gathered, "gradients scattered": scattered, "gradients over data": reduced,
            "tables over fsdp": tables, "activations over tensor": m * _reducing(summed * D * item, t),
            "statistics of logits": m * _reducing(4 * _STATISTICS * completion, t)}


def rollout_minimum(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Least bytes that a device sends to sample a batch, by purpose; letters as in `update_minimum`.

      weights gathered: once, in the compute dtype, from the training layout to shards over tensor alone:
        (f-1)/f b n/t for all n weights.
      prefill, decode: a token's sums over tensor, 2 L + 1 times 2 (t-1)/t b D, for every prompt token once and for every row
        in each of T - 1 decode steps.
      statistics of logits: a few float32 per drawn token.
    """
    d, f, t = mesh["data"], shards_of(mesh) // mesh["data"], mesh["tensor"]
    rows = w.prompts / (d * f)
    token = _reducing((2 * c.num_layers + 1) * c.hidden_size * w.itemsize, t)
    gathered = sum(_gathering(size / over_tensor * w.itemsize, over_fsdp)
                   for _, size, over_tensor, over_fsdp in _leaves(c, mesh))
    return {"weights gathered": gathered, "prefill": rows * w.prompt_tokens * token,
            "decode": rows * w.group * (w.completion_tokens - 1) * token,
            "statistics of logits": rows * w.group * w.completion_tokens * _reducing(4 * _STATISTICS, t)}


def minimum(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> dict[str, Bytes]:
    """Least bytes that a device sends on a mesh `{data, fsdp, tensor}`, by phase and purpose."""
    return {"update": update_minimum(c, w, mesh), "rollout": rollout_minimum(c, w, mesh)}
