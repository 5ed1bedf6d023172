"""The shape of a decoder-only transformer: what a checkpoint's own config says, and nothing about how it is run."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings beyond the trained length.

    Attributes:
      kind: `linear` (all frequencies divided by `factor`) or `llama3` (only the low ones, with a smooth ramp).
      factor: how many times longer the context became.
      low_freq_factor, high_freq_factor: the ramp's ends, in wavelengths per original context (`llama3`).
      original_max_positions: context length before scaling (`llama3`).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of every feed-forward layer.

    Attributes:
      count: `E`, experts of a layer.
      per_token: k, how many of them compute each token.
      size: width of one expert's gated feed-forward layer.
      normalize: the weights of a token's experts are made to add up to 1; otherwise they are what the softmax over all gives.
      shared_size: width of an expert that computes every token, times a sigmoid gate of its own (Qwen2-MoE); 0: none.
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
    """Architecture of one model of the Llama, Qwen2, Qwen3 or Gemma 3 family, or of their mixtures of experts.

    Attributes:
      vocab_size: `V`, rows of the embedding table.
      hidden_size: `D`, width of the residual stream.
      num_layers: `L`.
      num_heads, num_kv_heads: query heads and key/value heads; the second divides the first (grouped-query attention).
      head_dim: width of one head; need not be `hidden_size / num_heads`.
      mlp_size: width of the gated feed-forward layer.
      max_positions: longest sequence that the model was made for.
      activation: `silu` or `gelu_tanh`.
      norm_eps: epsilon of every RMSNorm.
      norm_offset: added to every RMSNorm scale (Gemma stores scales around zero: 1.0).
      post_norms: also normalise the output of attention and of the MLP before the residual sum (Gemma 3).
      qk_norm: RMSNorm over each head of queries and keys (Qwen3, Gemma 3).
      qk_norm_wide: one RMSNorm over all heads of the queries together and one over those of the keys (OLMoE).
      qkv_bias: bias on the query, key and value projections (Qwen2).
      tie_embeddings: the unembedding is the transposed embedding.
      embedding_scale: factor on the looked-up embeddings (Gemma: sqrt(D)).
      attention_scale: factor on the attention scores.
      rope_theta, rope_local_theta: base of the rotary frequencies of full and of sliding-window layers.
      rope_scaling: frequency scaling of the full-attention layers.
      window: tokens that a sliding-window layer sees, itself included; `None`: no such layer.
      local_layers: for each layer, whether it is a sliding-window layer.
      experts: the mixture in the place of every feed-forward layer, whose `mlp_size` is then not read; None: dense.
      family: the family's name in the checkpoint format (`llama`, `qwen2`, `qwen3`, `gemma3_text`, `mixtral`,
        `qwen2_moe`, `qwen3_moe`, `olmoe`).
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
    post_norms: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    qkv_bias: bool = False
    tie_embeddings: bool = True
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    rope_theta: float = 10_000.0
    rope_local_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    experts: Experts | None = None
    family: str = "llama"

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need pairs")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation={self.activation!r}; allowed: 'silu', 'gelu_tanh'")
        if self.local_layers and len(self.local_layers) != self.num_layers:
            raise ValueError(f"local_layers names {len(self.local_layers)} layers, num_layers is {self.num_layers}")
        if any(self.local_layers) and self.window is None:
            raise ValueError("local_layers marks sliding-window layers but window is None")
        if self.attention_scale is None:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if not self.local_layers:
            object.__setattr__(self, "local_layers", (False,) * self.num_layers)
