"""One row of the catalogue."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Part = tuple[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A published method as a composition of parts.

    `arxiv`: paper ids. `estimator`, `objective`: (name, hyper-parameters that differ from the factory's defaults).
    `needs`: fields of `Rollouts`, or entries of its `extras`, that the run has to record beyond what the parts say.
    `filters`, `controllers`: parts of `jaxrl_llm.control` by name. `defaults`: what the paper sets outside the parts,
    such as `group_size` and `epochs`. `equation`: its idea in one line. `missing`: why it cannot run yet.
    """

    slug: str
    title: str
    equation: str
    arxiv: tuple[str, ...] = ()
    estimator: Part = ("grpo", {})
    objective: Part = ("ppo_clip", {})
    needs: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    missing: str | None = None
