"""Where every parameter is stored in a checkpoint: one table, read by the loaders and by the export."""
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import families
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer

# module of our tree -> its name in Hugging Face files, its name in GGUF files; families add to it and change it
NAMES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "final_norm": ("model.norm", "output_norm"),
    "unembed": ("lm_head", "output"),
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
_ROTATED = ("q", "k")  # modules whose rows lie in rotary pairs


Index = tuple[slice, ...]
Layout = Callable[[Any], Any]  # a tree of shapes -> a tree of shardings


class Stored(NamedTuple):
    """Where a parameter is stored in one file format: rows `start` to `start + own` of the tensor `name` of `rows` rows.

    With `paired` (dimensions of a head, rotated dimensions) rows are adjacent rotary pairs in files and halves in our tree.
    """

    name: str
    start: int
    rows: int
    paired: tuple[int, int] | None

    def read(self, tensor: Any, own: int, index: Index) -> np.ndarray:
        """The part `index` of the parameter's own rows, from a tensor that can be read in parts."""
        if self.paired is not None:
            return halves_from_pairs(np.asarray(tensor[self.start:self.start + own]), *self.paired)[index]
        return tensor[slice(self.start + index[0].start, self.start + index[0].stop), *index[1:]]


class StoredTensor(NamedTuple):
    """One stored tensor: its `path` and `layer` in our tree (None outside the stack), its place in files, its shape there.

    expert: the layer's expert that it belongs to, if any; GGUF files store all experts of a layer as one tensor `[E, ...]`.
    """

    path: tuple[str, ...]
    layer: int | None
    hf: Stored
    gguf: Stored
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def transposed(self) -> bool:
        """Files keep matrices as `[out, in]`, we keep them as `[in, out]`."""
        return self.path[-1] == "kernel"

    def shape_of(self, stored: Stored) -> tuple[int, ...]:
        """The shape of the whole tensor that contains the parameter."""
        return (stored.rows, *self.shape[1:])


Read = Callable[[StoredTensor, Index], np.ndarray]


def places(config: ModelConfig) -> Iterator[StoredTensor]:
    """All stored tensors of a model; those of one stacked parameter are consecutive."""
    family = families.by_name(config.family)
    names = NAMES | family.names
    leaves = {tuple(key.key for key in keys): leaf.shape for keys, leaf in
              jax.tree_util.tree_flatten_with_path(Transformer(config).abstract_params())[0]}
    pairs = config.head_dim, config.rotary_dim
    paired = family.paired, family.gguf is not None and family.gguf.paired

    def in_layer(path, layer, expert, form) -> Stored:
        """Modules that share a tensor follow each other in it, in the order of the table."""
        _, module, kind = path
        name, suffix = names[module][form], "bias" if kind == "bias" else "weight"
        sharing = [other for other in names if names[other][form] == name and ("layers", other, kind) in leaves]
        rows = [leaves["layers", other, kind][-1] for other in sharing]
        whole = f"{('model.layers', 'blk')[form]}.{layer}.{name.format(expert)}.{suffix}"
        in_pairs = paired[form] and module in _ROTATED
        return Stored(whole, sum(rows[:sharing.index(module)]), sum(rows), pairs if in_pairs else None)

    for path, shape in leaves.items():
        if path[0] != "layers":
            hf, gguf = (Stored(f"{name}.weight", 0, shape[0], None) for name in names[path[0]])
            yield StoredTensor(path, None, hf, gguf, shape)
            continue
        experts = range(shape[1]) if len(shape) == 4 else (None,)
        shape = shape[:-3:-1] if path[-1] == "kernel" else shape[1:]
        for i in range(config.num_layers):
            for expert in experts:
                yield StoredTensor(path, i, in_layer(path, i, expert, 0), in_layer(path, i, expert, 1), shape, expert)


def halves_from_pairs(tensor: np.ndarray, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Rows of each head's first `rotary_dim` dimensions as pairs (i, i + rotary_dim/2) from adjacent pairs (2i, 2i + 1)."""
    return _regrouped(tensor, head_dim, rotary_dim, (rotary_dim // 2, 2))


def pairs_from_halves(tensor: np.ndarray, head_dim: int, rotary_dim: int) -> np.ndarray:
    """The inverse of `halves_from_pairs`."""
    return _regrouped(tensor, head_dim, rotary_dim, (2, rotary_dim // 2))


def _regrouped(tensor, head_dim, rotary_dim, groups):
    heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
    rotated = heads[:, :rotary_dim].reshape(-1, *groups, *tensor.shape[1:]).swapaxes(1, 2)
    rotated = rotated.reshape(-1, rotary_dim, *tensor.shape[1:])
    return np.concatenate([rotated, heads[:, rotary_dim:]], axis=1).reshape(tensor.shape)


class OpenCheckpoint(NamedTuple):
    """A checkpoint whose description is read and checked: `params(dtype, shardings)` reads its weights, see `assemble`."""

    config: ModelConfig
    params: Callable[[Any, Layout | None], dict]


def assemble(config: ModelConfig, read: Read, dtype: Any, layout: Layout | None = None) -> dict:
    """The parameter tree from `read(place, index)`, the part `index` of a stored tensor; without a `layout` on one device.

    With a layout each device gets only its shard, and only the parts of tensors that this process's devices hold are read.
    The host holds one parameter at a time.
    """
    abstract = Transformer(config).abstract_params()
    shardings = [None] * len(jax.tree.leaves(abstract)) if layout is None else jax.tree.leaves(layout(abstract))
    leaves = []
    for (_, stored), leaf, sharding in zip(
            itertools.groupby(places(config), lambda place: place.path), jax.tree.leaves(abstract), shardings, strict=True):
        part = functools.partial(_part, tuple(stored), leaf.shape, read, dtype)
        leaves.append(jnp.array(part(())) if sharding is None else jax.make_array_from_callback(leaf.shape, sharding, part))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _part(stored: tuple[StoredTensor, ...], shape: tuple[int, ...], read: Read, dtype: Any, index: Index) -> np.ndarray:
    """The part `index` of a parameter of that `shape`; `()` is all of it."""
    index = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index or (slice(None),) * len(shape), shape))
    if stored[0].layer is None:
        return np.array(read(stored[0], index), dtype)
    part = np.empty([one.stop - one.start for one in index], dtype)  # assigning to a layer converts its precision
    lead = 1 if stored[0].expert is None else 2  # axes of layers, and of their experts
    asked = [place for place in stored
             if all(one.start <= number < one.stop for one, number in zip(index[:lead], (place.layer, place.expert)))]
    inner = index[lead:]
    for own, place in zip(part.reshape(-1, *part.shape[lead:]), asked, strict=True):
        own[...] = read(place, inner[::-1]).T if place.transposed else read(place, inner)
    return part


def finite(name: str, part: np.ndarray, file: Any) -> np.ndarray:
    """A part of a stored tensor. Raises ValueError where float32 has no number for one of it."""
    with np.errstate(over="ignore"):  # of float64
        right = np.isfinite(part.astype(np.float32, copy=False))
    if not right.all():
        raise ValueError(f"tensor {name!r} in {file} holds {right.size - np.count_nonzero(right)} values of {right.size} that "
                         "are NaN or infinite, with which nothing is computed; fetch the checkpoint again, or take another")
    return part


def check_count(config: ModelConfig, most: int, what: str, file: Any) -> None:
    """Raises ValueError for more layers, or experts in them, than `most`, before a table of them is made."""
    experts = 1 if config.experts is None else config.experts.count
    if config.num_layers * experts > most:
        raise ValueError(f"{file}: num_hidden_layers={config.num_layers}{f' with {experts} experts each' * (experts > 1)}, but "
                         f"the files hold {most} {what}; the files and the config disagree")


def check_shape(tensor_name: str, shape: tuple[int, ...], expected: tuple[int, ...], file: Any) -> None:
    """Raises ValueError unless a stored tensor has the shape that the config implies."""
    if tuple(shape) != tuple(expected):
        raise ValueError(f"tensor {tensor_name!r} in {file}: expected shape {tuple(expected)}, found {tuple(shape)}; "
                         "the file and its config disagree")


def check_nothing_left(names: set[str], file: Any) -> None:
    """Raises ValueError for stored tensors that the architecture would not read: the model would compute something else."""
    if names:
        some = ", ".join(sorted(names)[:4])
        raise ValueError(f"{file} holds {len(names)} tensors that this architecture does not read ({some}"
                         f"{', ...' if len(names) > 4 else ''}); the model has a feature that is not supported")
