"""What sampling sees of learning."""
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.parallel.rules import path_name


class Snapshot(NamedTuple):
    """The policy and the values of knobs at one version, made by `Learner.publish`.

    Attributes:
      version: number of batches that the weights have learned from.
      params, lora: the weights, and adapters on them or None.
      key: the run's typed PRNG key; uids are folded into it.
      knobs: what controllers set, by name.  setters: the controller that sets each of them.
      prior: the state of the predictions of prompts, see `sampling.prior`; None without them.
    """

    version: int
    params: Any
    lora: Any
    key: jax.Array
    knobs: Mapping[str, Any] = types.MappingProxyType({})
    setters: Mapping[str, str] = types.MappingProxyType({})
    prior: Any = None


def check(snapshot: Snapshot, model: Transformer) -> None:
    """Raises ValueError for weights of another model, by their names and shapes, and for weights that an update consumed."""
    wanted, found = ({path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
                     for tree in (model.abstract_params(), snapshot.params))
    other = [name for name in wanted | found if name not in wanted or name not in found
             or wanted[name].shape != found[name].shape]
    if other:
        was, now = (list(tree[other[0]].shape) if other[0] in tree else "absent" for tree in (wanted, found))
        raise ValueError(f"a snapshot of another model: {other[0]} is {now}, and {was} in the model that samples; "
                         f"{len(other)} of {len(wanted)} arrays differ. Publish the state of a learner of the same run")
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves((snapshot.params, snapshot.lora))):
        raise ValueError(f"the weights of version {snapshot.version} were consumed by the update that began from them; sample "
                         "with publish(state) of the newest state, or keep publish(state, apart=True) before the update")
