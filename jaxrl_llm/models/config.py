"""The shape of a decoder-only transformer: the contents of a checkpoint's own config, and nothing about how it is run."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings beyond the trained length.

    Attributes:
      kind: `linear` (all frequencies divided by `factor`), `llama3` (only the low ones, with a smooth ramp), `yarn` (the same
        with the ramp of arXiv 2309.00071), `longrope` (arXiv 2402.13753) or `dynamic`.
      factor: how many times longer the context became.
      low_freq_factor, high_freq_factor: the ramp's ends, in wavelengths per original context (`llama3`); `yarn` calls them
        beta_slow and beta_fast.
      original_max_positions: context length before scaling (all but `linear`).
      attention_factor: factor on cosines and sines (`yarn`, `longrope`).
      truncate: the ramp begins and ends at whole dimensions (`yarn`).
      short_factors: divisor of each frequency up to the original context (`longrope`).
      long_factors: those beyond it, kept for the export alone (`longrope`).
      query_growth: beyond the original context queries grow by this times the logarithm of their position (Ministral 3).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_growth: float = 0.0

    @property
    def longest_row(self) -> int | None:
        """Tokens of the longest row that can be computed; None: there is no limit.

        Beyond it, `dynamic` and `longrope` give other frequencies to a whole row, which cached keys would not have, and growing
        queries are not implemented.
        """
        return self.original_max_positions if self.kind in ("dynamic", "longrope") or self.query_growth else None


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts that replaces every feed-forward layer.

    Attributes:
      count: `E`, experts of a layer.
      per_token: k, how many of them compute each token.
      size: width of one expert's gated feed-forward layer.
      normalize: whether the weights of a token's experts are scaled to add up to 1; otherwise the softmax over all gives them.
      shared_size: width of an expert that computes every token, multiplied by its own sigmoid gate (Qwen2-MoE); 0: none.
    """

    count: int
    per_token: int
    size: int
    normalize: bool = True
    shared_size: int = 0

    def __post_init__(self):
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"experts.per_token={self.per_token} of experts.count={self.count}; a token needs 1 to "
                             f"{self.count} experts")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model, as a set of features; `models.families` says which published family has which of them.

    Attributes:
      vocab_size: `V`, rows of the embedding table.
      hidden_size: `D`, width of the residual stream.
      num_layers: `L`.
      num_heads, num_kv_heads: query heads and key/value heads; the second divides the first (grouped-query attention).
      head_dim: width of one head; need not be `hidden_size / num_heads`.
      mlp_size: width of the gated feed-forward layer.
      max_positions: longest sequence that the model supports.
      activation: `silu` or `gelu_tanh`.
      norm_eps: epsilon of every RMSNorm.
      norm_offset: added to every RMSNorm scale (Gemma stores scales around zero: 1.0).
      pre_norms: normalise the input of attention and of the MLP (all but OLMo 2 and 3).
      post_norms: normalise the output of attention and of the MLP before the residual sum (Gemma, OLMo 2, GLM-4).
      qk_norm: RMSNorm over each head of queries and keys (Qwen3, Gemma 3).
      qk_norm_whole: `qk_norm` is taken over all heads together (OLMo 2, OLMoE).
      qkv_bias, o_bias, mlp_bias: bias on the query, key and value projections (Qwen2), on the output projection of attention,
        and on the three projections of the MLP.
      tie_embeddings: the unembedding is the transposed embedding.
      embedding_scale: factor on the looked-up embeddings (Gemma: sqrt(D)).
      residual_scale: factor on what attention and the MLP add to the residual stream (Granite).
      attention_scale: factor on the attention scores; None: 1/sqrt(head_dim).
      attention_softcap, logit_softcap: scores and logits y become cap * tanh(y / cap) (Gemma 2); None: they stay.
      logit_divisor: the logits are divided by it (Granite).
      rope_theta, rope_local_theta: base of the rotary frequencies of full and of sliding-window layers.
      rope_scaling, rope_local_scaling: frequency scaling of these layers.
      rotary_factor: share of each head, from its first dimension on, that is rotated (Phi-4-mini, GLM-4).
      window: tokens that a sliding-window layer sees, itself included; `None`: no such layer.
      local_layers: for each layer, whether it is a sliding-window layer.
      rotary_layers: for each layer, whether queries and keys are rotated at all (SmolLM3).
      experts: the mixture that replaces every feed-forward layer; `mlp_size` is then unused. None: dense.
      family: name of the family in `models.families` in whose format this model is saved.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int = 2048
    activation: str = "silu"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    rope_theta: float = 10_000.0
    rope_local_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_local_scaling: RopeScaling | None = None
    rotary_factor: float = 1.0
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    rotary_layers: tuple[bool, ...] = ()
    experts: Experts | None = None
    family: str = "llama"

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need pairs" if self.rotary_factor == 1 else
                             f"rotary_factor={self.rotary_factor} rotates {self.rotary_dim} of {self.head_dim} dimensions; an "
                             "even number of them is allowed")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation={self.activation!r}; allowed: 'silu', 'gelu_tanh'")
        for name in ("local_layers", "rotary_layers"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{name} names {count} layers, num_layers is {self.num_layers}")
        if any(self.local_layers) and not self.window:
            raise ValueError(f"local_layers marks sliding-window layers but window is {self.window}")
        for scaling in (self.rope_scaling, self.rope_local_scaling):
            if scaling and scaling.kind == "longrope" and len(scaling.short_factors) != self.rotary_dim // 2:
                raise ValueError(f"short_factors of rope_scaling has {len(scaling.short_factors)} numbers; expected one for "
                                 f"each of {self.rotary_dim // 2} frequencies")
        if self.attention_scale is None:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if not self.local_layers:
            object.__setattr__(self, "local_layers", (False,) * self.num_layers)
        if not self.rotary_layers:
            object.__setattr__(self, "rotary_layers", (True,) * self.num_layers)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.head_dim * self.rotary_factor)

    def places(self, length: int, near: int | None) -> tuple[int, ...]:
        """Places of each layer in a cache of `length` tokens: sliding-window layers keep `near`, if given and fewer."""
        return tuple(length if near is None or not local else min(length, near) for local in self.local_layers)
