"""A decoder's shape, read from a Hugging Face config."""

from dataclasses import dataclass
from typing import Any

from quire.layers.rotary import RopeParameters

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # per layer; None: full attention
    ropes: tuple[RopeParameters, ...]  # per layer

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf(
        cls,
        hf: dict[str, Any],
        windows: tuple[int | None, ...] | None = None,
        head_dim: int | None = None,
        **differences: bool,
    ) -> "DecoderConfig":
        """`windows`, `head_dim` and `differences` are what the family declares; the config's own head_dim wins."""
        require(hf, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        activation = hf.get("hidden_act") or "silu"
        if activation != "silu":
            raise ValueError(f"activation {activation!r} (hidden_act) is not supported; supported: silu")
        heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
        head_dim = hf.get("head_dim") or head_dim or hf["hidden_size"] // heads
        windows = windows if windows is not None else (None,) * layers
        if len(windows) != layers:
            raise ValueError(f"layer_types names {len(windows)} layers, num_hidden_layers is {layers}")
        return cls(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            windows=windows,
            ropes=tuple(RopeParameters.from_hf(hf, head_dim, SLIDING if w else FULL) for w in windows),
            **differences,
        )


def require(hf: dict[str, Any], *names: str) -> None:
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"the model's config lacks {', '.join(missing)}")


def windows_by_layer_type(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's rule: a window only with use_sliding_window; layer_types, or all layers from max_window_layers on."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = [SLIDING if window and i >= first else FULL for i in range(hf["num_hidden_layers"])]
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in types)
