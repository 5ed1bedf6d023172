"""Mixtures of experts in checkpoints: the keys that describe one, and the names of its modules in files."""
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import Experts


@dataclasses.dataclass(frozen=True)
class Mixture:
    """How a family's `config.json` describes its experts.

    Attributes:
      count: key with the number of experts, as published; current releases may call it `num_local_experts`.
      size: key with the width of one.
      shared: key with the width of the expert that computes every token; None: there is none.
      normalize: whether the weights of a token's experts add up to 1, if no key states it; None: `norm_topk_prob` does.
      gguf_normalize: the same for GGUF files that do not state it.
    """

    count: str
    size: str
    shared: str | None = None
    normalize: bool | None = None
    gguf_normalize: bool = False

    def read_keys(self) -> set[str]:
        """The keys of `config.json` that are read."""
        keys = {self.count, self.size, "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "mlp_only_layers",
                "decoder_sparse_step"}
        return keys | ({self.shared} if self.shared else set())

    def renamed(self, raw: dict) -> dict:
        """A `config.json` in which the key of the number of experts is `count`."""
        return {self.count: raw["num_local_experts"]} | raw if "num_local_experts" in raw else raw

    def read(self, raw: Mapping[str, Any], file: Any) -> Experts:
        """The experts of a `config.json` with its defaults; ValueError where some layers have no experts."""
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{file}: mlp_only_layers={raw.get('mlp_only_layers')}, decoder_sparse_step="
                             f"{raw.get('decoder_sparse_step')} leave layers without experts; supported: experts in all "
                             "layers (an empty list, 1)")
        normalize = raw.get("norm_topk_prob", False) if self.normalize is None else self.normalize
        return Experts(raw[self.count], raw["num_experts_per_tok"], raw[self.size], normalize=normalize,
                       shared_size=raw[self.shared] if self.shared else 0)

    def written(self, experts: Experts) -> dict[str, Any]:
        """The keys of `config.json` that describe the experts."""
        said: dict[str, Any] = {self.count: experts.count, "num_experts_per_tok": experts.per_token, self.size: experts.size}
        if self.normalize is None:
            said["norm_topk_prob"] = experts.normalize
        return said if self.shared is None else said | {self.shared: experts.shared_size}

    @property
    def gguf_required(self) -> tuple[str, ...]:
        """The metadata keys without which a GGUF file is refused."""
        return ("expert_count", "expert_used_count") + (("expert_shared_feed_forward_length",) if self.shared else ())

    def in_gguf(self, metadata: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
        """The same keys from the metadata of a GGUF file, and from the `config.json` so far."""
        said = {self.count: metadata["expert_count"], "num_experts_per_tok": metadata["expert_used_count"],
                self.size: metadata.get("expert_feed_forward_length", raw.get("intermediate_size")),
                "norm_topk_prob": metadata.get("expert_weights_norm", self.gguf_normalize)}
        return said if self.shared is None else said | {self.shared: metadata["expert_shared_feed_forward_length"]}


def named(router: str, experts: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"):
    """Module -> its name in Hugging Face files, with `{}` for the expert, and in GGUF files, one tensor for all experts."""
    return {"router": (router, "ffn_gate_inp"), "experts_gate": (f"{experts}.{{}}.{gate}", "ffn_gate_exps"),
            "experts_up": (f"{experts}.{{}}.{up}", "ffn_up_exps"), "experts_down": (f"{experts}.{{}}.{down}", "ffn_down_exps")}


NAMES = named("mlp.gate", "mlp.experts")
