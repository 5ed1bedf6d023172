"""Memory and time of a training step on a mesh, estimated from shapes alone: whether it fits, and if not, what would.

Memory is the peak of the compiled programs, modelled step by step: the float32 weights and the state of the optimiser, then
the update (gradients, what the checkpoint policy of `models.transformer` stores, one layer's intermediate results) or the
sampler (the weights as it reads them, the caches), whichever needs more. Every prompt and completion has its maximum length.
Within 25% of the compiler's own figures for tiny models and SmolLM2 in float32, on one device and on meshes of eight
(tests/planning/test_memory_plan.py).
"""
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_llm.evaluation import flops
from jaxrl_llm.kernels import flash
from jaxrl_llm.kernels.attention import BLOCK
from jaxrl_llm.models import lora
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.mesh import AXES, shards_of
from jaxrl_llm.parallel.rules import axes_of, path_name, spec_of
from jaxrl_llm.planning.presets import Device

MARGIN = 0.15  # of the usable memory: on kinds of devices that never ran estimated work, a smaller margin is no fit
USABLE = 0.9  # share of a device's memory to plan with: the runtime, its programs and fragmentation take the rest
_VIEW = 16  # bytes per token of a mini-batch in an update from packed rows: index, log-prob, entropy, cotangent
_READ_AT_ONCE = 8  # prompts that the slot engine computes together
_CHUNK = 512  # rows of logits at a time, see `learning.policy.Policy`
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
Bytes = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step computes.

    Attributes:
      prompts, group, prompt_tokens, completion_tokens: P, G, S, T.
      minibatches, micro_batches, sampling_parts: number of parts that the prompts are divided into, see `setup.config`.
      epochs: passes over each batch.
      dtype: dtype of activations, `float32` or `bfloat16`.
      remat: whether layers are computed again in the backward pass.
      lora_rank: rank of adapters; 0 if all weights are trained.
      passes: forward passes over the batch beside the update's own (old and reference log-probs).
      reference: whether frozen weights are kept beside the trained ones.
      teachers: bytes of the weights of other models on each device of a mesh.
      critic: whether a second transformer is trained.
      average: whether a moving average of the trained weights is kept.
      offload: which of `optimizer` and `reference` wait in the host's memory.
      optimizer: the optimiser of the policy, and of the critic.
      rows, row_tokens: packed rows of a micro-batch and tokens of the longest; 0 rows: a prompt with its group is one row.
      int8_cache: whether the sampler's caches hold eight bits for a number and 32 for the scale of a vector.
      slots: whether the slot engine samples: each row has a cache of its own for the longest trajectory, prompt included.
      replica: number of devices that share the sampler's weights, `sampling.tensor`; 0: as many as `tensor` of the mesh.
    """

    prompts: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    minibatches: int = 1
    micro_batches: int = 1
    sampling_parts: int = 1
    epochs: int = 1
    dtype: str = "float32"
    remat: bool = False
    lora_rank: int = 0
    passes: int = 0
    reference: bool = False
    teachers: Callable[[Mapping[str, int]], float] | None = None
    critic: bool = False
    average: bool = False
    offload: tuple[str, ...] = ()
    optimizer: optax.GradientTransformation = optax.adamw(1e-3)
    rows: int = 0
    row_tokens: int = 0
    int8_cache: bool = False
    slots: bool = False
    replica: int = 0

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    def cached_token(self, c: ModelConfig) -> float:
        """Bytes of a token's key and value in one layer's cache."""
        vector = c.head_dim + 4 if self.int8_cache else c.head_dim * self.itemsize
        return 2 * c.num_kv_heads * vector

    @property
    def learned_at_once(self) -> float:
        """Prompts of a micro-batch."""
        return self.prompts / (self.minibatches * self.micro_batches)

    @property
    def sampled_at_once(self) -> float:
        """Prompts that are decoded together."""
        return self.prompts / self.sampling_parts

    def fits_mesh(self, mesh: Mapping[str, int]) -> bool:
        """Whether the mesh divides the prompts of every part, and the packed rows."""
        shards, seq = shards_of(mesh), mesh.get("seq", 1)
        cut = seq == 1 or self.rows > 0 and self.row_tokens % seq == 0
        sampled = (self.slots or self.sampled_at_once % shards == 0) and math.prod(mesh.values()) % (self.replica or 1) == 0
        return cut and self.rows % (shards // seq) == 0 and self.learned_at_once % shards == 0 and sampled

    def computed_at_once(self, mesh: Mapping[str, int]) -> tuple[float, float, float]:
        """Per shard of a mesh and micro-batch: tokens, scores of a head, and the tokens that have logits.

        Scores exist for a block of queries of every row; in packed rows, for a block of queries with a block of keys. (The
        latter holds for rectangular rows of more than 512 tokens too: the plan overestimates these.)
        """
        shards = shards_of(mesh)
        if self.rows:
            tokens, rows = self.rows / shards * self.row_tokens, self.rows / shards * mesh.get("seq", 1)
            return tokens, rows * min(self.row_tokens, flash.BLOCK) ** 2, tokens
        P, G, S, T = self.learned_at_once / shards, self.group, self.prompt_tokens, self.completion_tokens
        return P * (S + G * T), P * (G * min(T, BLOCK) * (T + S) + min(S, BLOCK) * S), P * G * T


@functools.lru_cache(maxsize=64)
def _leaves(c: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Path and shape of every parameter."""
    leaves = jax.tree.leaves_with_path(Transformer(c).abstract_params())
    return tuple((path_name(path), leaf.shape) for path, leaf in leaves)


def parameters(c: ModelConfig) -> int:
    """Number of weights of a model."""
    return sum(math.prod(shape) for _, shape in _leaves(c))


def active_parameters(c: ModelConfig) -> int:
    """Number of weights that compute a token: all but those of the experts that it is not sent to."""
    return parameters(c) - _layer_matrices(c) + flops.matmul_parameters(c, unembedding=False)


def _layer_matrices(c: ModelConfig, rows: float = math.inf) -> int:
    """Weights of the matrices of all layers; of experts, at most those that `rows` rows can be sent to."""
    experts = None if c.experts is None else int(min(c.experts.count, rows * c.experts.per_token))
    return flops.matmul_parameters(c, unembedding=False, experts=experts)


def _mlp_width(c: ModelConfig) -> int:
    """Width of a token's feed-forward layers, counting its experts side by side."""
    return c.mlp_size if c.experts is None else c.experts.per_token * c.experts.size + c.experts.shared_size


def weights_per_device(c: ModelConfig, mesh: Mapping[str, int]) -> float:
    """Weights that each device holds under the partition table: arrays that do not divide are replicated."""
    return sum(_share(path, shape, mesh) for path, shape in _leaves(c))


def _share(path: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> float:
    """Numbers of an array that each device holds."""
    return math.prod(shape) / math.prod(mesh[axis] for entry in spec_of(path, shape, mesh) for axis in axes_of(entry))


@functools.lru_cache(maxsize=64)
def _state_leaves(c: ModelConfig, lora_rank: int, optimizer: optax.GradientTransformation
                  ) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """Path, shape and bytes of a number of every array in the state of an optimiser of all weights, or of adapters."""
    params = Transformer(c).abstract_params()
    if lora_rank:
        params = jax.eval_shape(lambda: lora.init(jax.random.key(0), params, lora_rank, 1.0))
    leaves = jax.tree.leaves_with_path(jax.eval_shape(optimizer.init, params))
    return tuple((path_name(path), leaf.shape, leaf.dtype.itemsize) for path, leaf in leaves)


def state_memory(c: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mapping[str, int], lora_rank: int = 0) -> float:
    """Bytes per device of the state of an optimiser of all weights, or of adapters."""
    return sum(size * _share(path, shape, mesh) for path, shape, size in _state_leaves(c, lora_rank, optimizer))


def adapter_weights(c: ModelConfig, rank: int) -> int:
    """Weights of adapters of that rank on all matrices of the layers except those of experts."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    ends = [(c.hidden_size, q), (c.hidden_size, kv), (c.hidden_size, kv), (q, c.hidden_size)]
    ends += [(c.hidden_size, c.mlp_size)] * 2 + [(c.mlp_size, c.hidden_size)] if c.experts is None else []
    return c.num_layers * rank * sum(a + b for a, b in ends)


def kept_memory(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Bytes per device that stay for the whole run: float32 weights, the optimiser's state, what the method adds.

    Off-loaded arrays return when they are used: the optimiser's state in updates (see `update_memory`), the reference
    for its log-probs, which still need less than an update.
    """
    weights = 4 * weights_per_device(c, mesh)
    trained = 4 * adapter_weights(c, w.lora_rank) if w.lora_rank else weights
    kept = "optimizer" not in w.offload
    return {"weights": weights + (trained if w.lora_rank else 0),
            "optimiser": kept * state_memory(c, w.optimizer, mesh, w.lora_rank),
            "reference": weights * (w.reference and "reference" not in w.offload),
            "critic": w.critic * (weights + kept * state_memory(c, w.optimizer, mesh)),
            **({"average": trained} if w.average else {}), **({"teachers": w.teachers(mesh)} if w.teachers else {})}


def update_memory(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Bytes per device at the peak of an update, beside `kept_memory`.

    stored: for every token and layer the residual stream and, unless layers are recomputed, the results of the matrix
    products and of attention that the backward pass reads. one layer: scores, gated products and norms of the layer being
    differentiated, either around its attention or around its MLP. gathered: sharded tables, two layers at a time; for rows
    that are cut over `seq`, keys and values of a layer with their float32 gradients, or the states at the end.
    """
    shards, tensor, item = shards_of(mesh), mesh["tensor"], w.itemsize
    D, M, (tokens, pairs, predicted) = c.hidden_size, _mlp_width(c), w.computed_at_once(mesh)
    several = w.micro_batches > 1 or w.rows > 0
    held = weights_per_device(c, mesh)
    per_token = 0 if c.experts is None else c.experts.per_token  # rows of a token beside each other, before they are summed
    products = (1 + c.post_norms + per_token) * D + ((2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 2 * M) / tensor
    stored = tokens * c.num_layers * item * (D + (0 if w.remat else products))
    scores = 4 * c.num_heads * pairs / tensor
    layer = max((5 * M / tensor + 10 * per_token * D) * tokens * item, 4 * scores) + 6 * 4 * D * tokens
    layer += tokens * products * item if w.remat else 0
    table = 4 * c.vocab_size * D / tensor
    gradients = 4 * (adapter_weights(c, w.lora_rank) if w.lora_rank else held) * (2 if several else 1)
    layer += 0 if w.lora_rank or not c.tie_embeddings else table  # its gradient as unembedding, until that as embedding
    # While the logits exist, no gradient of a layer does yet; sums over micro-batches do.
    logits = 3 * 4 * min(_CHUNK, predicted) * c.vocab_size / tensor + (item < 4) * item / 4 * table  # which is cast once
    waiting = max(layer + gradients, logits + table + (gradients / 2 if several else 0))
    gathered = table * (1 if c.tie_embeddings else 2)
    gathered += 2 * 4 * (_layer_matrices(c) / c.num_layers) / tensor
    returned = 0.0
    if "optimizer" in w.offload:
        returned = state_memory(c, w.optimizer, mesh, w.lora_rank) + w.critic * state_memory(c, w.optimizer, mesh)
    return {"gradients": gradients, "optimiser from the host": returned, "stored activations": stored,
            "one layer or the logits": waiting - gradients,
            "gathered weights": gathered if mesh["fsdp"] * mesh.get("seq", 1) > 1 else 0.0,
            **({"gathered rows": tokens * mesh["seq"] * _gathered_of_slot(c, item, tensor)} if mesh.get("seq", 1) > 1 else {}),
            "batch": (32 + _VIEW * (w.rows > 0) / w.minibatches) * w.prompts * w.group * w.completion_tokens / shards}


def _gathered_of_slot(c: ModelConfig, item: int, tensor: int) -> float:
    """Bytes of a slot of a row that each device along `seq` has for a while."""
    return max(2 * c.num_kv_heads * c.head_dim * (item + 4) / tensor, 2 * c.hidden_size * item)


class Replicas(NamedTuple):
    """The sampler's layout of a mesh: `number` replicas of `size` devices, which share heads and matrices in `pieces`."""

    number: int
    size: int
    pieces: int


def replicas(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Replicas:
    """Pieces are as many as devices of a replica, or one if these do not divide the heads."""
    size = w.replica or mesh["tensor"]
    return Replicas(math.prod(mesh.values()) // size, size, size if c.num_kv_heads % size == 0 else 1)


def _travels(w: Work, mesh: Mapping[str, int]) -> bool:
    """Whether the sampler needs the weights in another layout than that of the learner."""
    return mesh["fsdp"] * mesh.get("seq", 1) > 1 or w.replica not in (0, mesh["tensor"])


def _gathered(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> float:
    """Bytes per device of the weights in the sampler's layout, if they travel there."""
    number, size, _ = replicas(c, w, mesh)
    return weights_per_device(c, {"data": number, "fsdp": 1, "tensor": size}) * w.itemsize * _travels(w, mesh)


def publish_memory(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Bytes per device at the peak of a publication, beside `kept_memory`; none if the weights do not travel.

    Layers travel one after the other: beside the result a device holds its shards in the sampler's precision, and one matrix
    of a layer, or the tables, whole.
    """
    if not _travels(w, mesh):
        return {}
    size = replicas(c, w, mesh).size
    layers = [math.prod(shape[1:]) for path, shape in _leaves(c) if path.startswith("layers/")]
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    return {"gathered weights": _gathered(c, w, mesh), "shards to send": weights_per_device(c, mesh) * w.itemsize,
            "largest leaf": max(*layers, tables) * w.itemsize / (size if size == mesh["tensor"] else 1)}


def sampler_memory(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Bytes:
    """Bytes per device at the peak of sampling, beside `kept_memory`: weights as sampling needs them, caches.

    gathered: the weights in the layout of rollouts, sharded over `tensor` alone, unless they are kept so; and whole ones if
    `tensor` does not divide the heads. copy: their matrices one by one, as decoding reads them. Rows of the slot engine have
    caches for prompt and completion, beside which it keeps the batch's prompts, computed a few at a time.
    """
    (shards, size, tensor), item = replicas(c, w, mesh), w.itemsize
    P, G, S, T = w.sampled_at_once / shards, w.group, w.prompt_tokens, w.completion_tokens
    matrices = _layer_matrices(c) * item / tensor
    gathered = _gathered(c, w, mesh) + (parameters(c) * item if tensor < size else 0.0)
    table = c.vocab_size * c.hidden_size * item / tensor if item < 4 and not gathered else 0
    if w.slots:
        rows = math.ceil(P * G)
        places, read = sum(rows * own + P * S for own in c.places(S + T, c.window)), min(P, _READ_AT_ONCE)
    else:
        places, read = P * sum(G * own + S + near for own, near in zip(c.places(T - 1, c.window), c.places(S, c.window))), P
    caches = w.cached_token(c) / tensor * places
    prefill = read * (3 * 4 * c.num_heads * S * S / tensor + S * item * (3 * _mlp_width(c) / tensor + 6 * c.hidden_size))
    return {"gathered weights": gathered, "copy of the weights": matrices + table, "caches": caches,
            "logits": 4 * 4 * P * G * c.vocab_size / tensor, "prefill": prefill}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes per device on a mesh, by phase and purpose."""

    mesh: dict[str, int]
    kept: Bytes
    update: Bytes
    sampler: Bytes
    publish: Bytes

    @property
    def updating(self) -> float:
        return sum(self.kept.values()) + sum(self.update.values())

    @property
    def sampling(self) -> float:
        return sum(self.kept.values()) + max(sum(self.sampler.values()), sum(self.publish.values()))

    @property
    def peak(self) -> float:
        return max(self.updating, self.sampling)

    def margin(self, device: Device) -> float:
        """Share of the usable memory that is left; below 0 if memory is too small."""
        return 1 - self.peak / (USABLE * device.memory)

    def answer(self, device: Device) -> str:
        """"fits" with at least `MARGIN` left; "tight" with less, on devices that are `measured`; else "no"."""
        margin = self.margin(device)
        return "fits" if margin >= MARGIN else "tight" if margin >= 0 and device.measured else "no"

    def fits(self, device: Device) -> bool:
        return self.answer(device) != "no"


def estimate(c: ModelConfig, w: Work, mesh: Mapping[str, int]) -> Estimate:
    """Memory per device of the work on a mesh `{data, fsdp, tensor}`, with `seq` where it cuts rows."""
    return Estimate(dict(mesh), kept_memory(c, w, mesh), update_memory(c, w, mesh), sampler_memory(c, w, mesh),
                    publish_memory(c, w, mesh))


def step_flops(c: ModelConfig, w: Work) -> dict[str, float]:
    """Useful operations of one step over all devices, by phase (see `evaluation.flops`)."""
    P, S, lengths = w.prompts, w.prompt_tokens, [w.completion_tokens] * w.group
    return {"prefill": P * flops.prefill_flops(c, [S]),
            "decode": P * w.group * flops.decode_flops(c, S, w.completion_tokens),
            "record": w.passes * P * flops.packed_flops(c, S, lengths),
            "update": (1 + w.critic) * w.epochs * P * flops.update_flops(c, S, lengths)}


def ideal_seconds(c: ModelConfig, w: Work, mesh: Mapping[str, int], device: Device) -> dict[str, float]:
    """Least seconds of each phase: its operations at the bfloat16 peak, and for decoding the memory traffic if that is longer.

    A decode step reads the weights, of experts at most as many as its rows are sent to, and, on average, half the completion
    caches. Communication and the host are not counted, so measurements stay above these numbers.
    """
    count = math.prod(mesh.values())
    seconds = {phase: operations / (count * device.flops) for phase, operations in step_flops(c, w).items()}
    shards, _, pieces = replicas(c, w, mesh)
    weights = (_layer_matrices(c, w.sampled_at_once * w.group / shards) + c.vocab_size * c.hidden_size) * w.itemsize / pieces
    traffic = (weights + sampler_memory(c, w, mesh)["caches"] / 2) * (w.completion_tokens - 1) * w.sampling_parts
    return seconds | {"decode": max(seconds["decode"], traffic / device.bandwidth)}


def meshes(c: ModelConfig, w: Work, count: int) -> Iterator[dict[str, int]]:
    """Meshes of `count` devices that the batch divides over, those with the least communication first.

    `tensor` stays within 8 devices, one host's worth, and divides the key/value heads; `seq`, which cuts packed rows, is last.
    """
    powers = [2**n for n in range(count.bit_length()) if count % 2**n == 0]
    sizes = [1, *(n for n in range(2, count + 1) if count % n == 0)]
    for seq in powers if w.rows else [1]:
        for tensor in (n for n in powers if n <= 8 and c.num_kv_heads % n == 0):
            for fsdp in (n for n in sizes if count % (seq * tensor * n) == 0):
                mesh = {"data": count // (seq * tensor * fsdp), "fsdp": fsdp, "tensor": tensor}
                mesh |= {"seq": seq} if seq > 1 else {}
                if w.fits_mesh(mesh):
                    yield mesh


def best(c: ModelConfig, w: Work, device: Device, count: int) -> Estimate | None:
    """The first mesh that fits, else the one that needs least; None if no mesh divides the batch.

    Of meshes that do not fit, those come first on which the sampler's weights do, and the caches of the slot engine: smaller
    parts of a batch do not change these.
    """
    estimates = [estimate(c, w, mesh) for mesh in meshes(c, w, count)]
    room = USABLE * device.memory * (1 if device.measured else 1 - MARGIN)
    divided = () if w.slots else ("caches", "logits", "prefill")

    def stays(e: Estimate) -> float:
        return sum(e.kept.values()) + sum(size for name, size in e.sampler.items() if name not in divided)

    least = min(estimates, key=lambda e: (stays(e) > room, e.peak), default=None)
    return next((e for e in estimates if e.fits(device)), least)


_KEYS = {"micro_batches": "learner.micro_batches", "sampling_parts": "sampling.micro_batches", "dtype": "model.dtype",
         "remat": "model.remat", "rows": "learner.packed_rows"}


def remedies(c: ModelConfig, w: Work, device: Device, count: int) -> tuple[dict[str, Any], Work, Estimate | None]:
    """What to change, in order of cost, until the work fits: `(changes, changed work, estimate)`; estimate None: nothing helps.

    Cheapest first: more parts, which cost nothing but idle units; bfloat16; recomputing layers, a third more work.
    """
    changes, current = {}, best(c, w, device, count)
    while current is not None and not current.fits(device):
        by_update = current.updating >= current.sampling
        smaller = {"rows": w.rows // 2} if w.rows > 1 else {} if w.rows else {"micro_batches": 2 * w.micro_batches}
        fewer = {} if w.slots else {"sampling_parts": 2 * w.sampling_parts}  # trajectories of a batch are alive together
        options: list[dict[str, Any]] = [smaller if by_update else fewer]
        options += [{"dtype": "bfloat16"}] * (w.dtype == "float32") + [{"remat": True}] * (by_update and not w.remat)
        for option in options:
            changed = dataclasses.replace(w, **option)
            better = best(c, changed, device, count)
            phase = "updating" if by_update else "sampling"  # the other may need nearly as much, and is next
            if better is not None and (better.fits(device) or getattr(better, phase) < 0.98 * getattr(current, phase)):
                w, current, changes = changed, better, changes | option
                break
        else:
            current = None
    return {_KEYS[name]: value for name, value in changes.items()}, w, current


def placed(c: ModelConfig, w: Work, device: Device, count: int, mesh: Mapping[str, int] | None = None) -> Estimate:
    """The estimate on this mesh, or on the best one, see `best`, whether it fits or not.

    Raises ValueError: the batch does not divide over it.
    """
    chosen = best(c, w, device, count) if mesh is None else estimate(c, w, mesh)
    if chosen is None or not w.fits_mesh(chosen.mesh):
        parts = f"{w.learned_at_once:g} per micro-batch and {w.sampled_at_once:g} per sampling part"
        parts += f", with learner.packed_rows={w.rows}" if w.rows else ""
        where = f"{count} devices" if mesh is None else named(mesh)
        raise ValueError(f"prompts.per_step={w.prompts} ({parts}) do not divide over data x fsdp of {where}; use more prompts "
                         "per step, fewer parts, a larger mesh.tensor (up to 8), or fewer devices")
    return chosen


def refusal(c: ModelConfig, w: Work, device: Device, count: int, plan: Estimate) -> str:
    """Why an estimate does not fit: what takes the memory, and what to change."""
    phases = {"an update": plan.update, "sampling": plan.sampler, "publishing weights": plan.publish}
    phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
    largest = sorted((plan.kept | parts).items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in largest)
    left = "" if plan.margin(device) < 0 else (f" The {plan.margin(device):.0%} that are left are less than the {MARGIN:.0%} "
                                                f"that an estimate needs which no {device.name} has confirmed.")
    return (f"{phase} needs {plan.peak / 1e9:.1f} GB on each of {count} devices ({named(plan.mesh)}), of which {device.name} "
            f"has {device.memory / 1e9:.0f}, {USABLE:.0%} of it usable: mostly {most}.{left} {advice(c, w, device, count)}")


def advice(c: ModelConfig, w: Work, device: Device, count: int) -> str:
    """A sentence on how to make work fit that does not fit on `count` devices."""
    for factor in (1, 2, 4, 8, 16, 32, 64):
        changes, _, chosen = remedies(c, w, device, factor * count)
        if chosen is not None:
            where = "It fits" if factor == 1 else f"It would fit on {factor * count} devices"
            keys = " ".join([*(f"{key}={value}" for key, value in changes.items()), named(chosen.mesh)])
            return f"{where} ({chosen.peak / 1e9:.1f} GB) with {keys}"
    least = "a packed row" if w.rows else "one prompt with its group (without learner.packed_rows)"
    return (f"No mesh of up to 64 times as many devices helps: {least} is the least that is worked on at a time, and sampling "
            "spreads the weights over mesh.tensor alone. Lower sampling.max_tokens, sampling.group or prompts.max_tokens, "
            "train adapters (lora.rank=16), or take a smaller model")


def named(mesh: Mapping[str, int]) -> str:
    """A mesh written as keys of a configuration."""
    return " ".join(f"mesh.{axis}={mesh[axis]}" for axis in (*AXES, *(["seq"] if mesh.get("seq", 1) > 1 else [])))
