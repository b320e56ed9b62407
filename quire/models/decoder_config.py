"""A decoder's shape and its differences from Llama, read from a Hugging Face config."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.kernels.activation import ACTIVATIONS, SILU
from quire.layers.latent_attention import LatentSizes
from quire.layers.rotary import RopeParameters
from quire.models.config_checks import check_decoder, check_keys

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModuleNames:
    """Names of a layer's linears in checkpoints; quantization configs list layers by these."""

    layer: str = "model.layers.{i}"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # per layer; None: full attention
    ropes: tuple[RopeParameters | None, ...]  # per layer; None: nothing is rotated
    names: ModuleNames = ModuleNames()

    # Embedding and head
    embed_scale: float = 1.0
    scales_given_embeds: bool = False  # embeddings that a prompt brings are scaled too
    num_positions: int = 0  # learned position embeddings; 0: none
    position_offset: int = 0  # row of position 0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    # Layers: where norms are, and how results are added
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    pre_norm: bool = True  # before attention and before the MLP
    post_norm: bool = False  # of their outputs, before these are added
    parallel: bool = False  # attention and MLP read the same stream
    mlp_norm: bool = True  # False: parallel layers share one norm
    residual_scale: float = 1.0

    # Attention
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "width", "layer"] | None = None  # RMSNorm per head or over all heads; LayerNorm per head
    qkv_clip: float | None = None
    attention_scale: float | None = None  # default: head_dim ** -0.5
    attention_softcap: float | None = None
    alibi: float = 0.0  # factor on ALiBi's slopes; 0: no ALiBi
    sinks: bool = False
    causal: bool = True  # False: a prompt's tokens see each other, and nothing is kept in a cache
    latent: LatentSizes | None = None  # of latent attention; None: each head has keys and values of its own

    # MLP
    activation: str = SILU
    gated: bool = True
    mlp_bias: bool = False
    up_bias: bool | None = None  # of an MLP's first linears, where that differs

    def __post_init__(self) -> None:
        check_decoder(self)

    @classmethod
    def from_hf(
        cls,
        hf: dict[str, Any],
        windows: tuple[int | None, ...] | None = None,
        head_dim: int | None = None,
        ropes: tuple[RopeParameters | None, ...] | None = None,
        **differences: Any,
    ) -> "DecoderConfig":
        """`windows`, `ropes` and `differences` are declared by the family; `head_dim` is its default."""
        require(hf, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        check_keys(hf)
        heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
        head_dim = hf.get("head_dim") or head_dim or hf["hidden_size"] // heads
        windows = windows if windows is not None else (None,) * layers
        if ropes is None:
            kinds = [SLIDING if window else FULL for window in windows]
            made = {kind: RopeParameters.from_hf(hf, head_dim, kind) for kind in set(kinds)}
            ropes = tuple(made[kind] for kind in kinds)
        read = {
            "vocab_size": hf["vocab_size"],
            "hidden_size": hf["hidden_size"],
            "intermediate_size": hf["intermediate_size"],
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": hf.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "norm_eps": hf.get("rms_norm_eps", 1e-6),
            "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
            "windows": windows,
            "ropes": ropes,
            "activation": hf.get("hidden_act") or SILU,
        }
        config = cls(**(read | differences))
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"activation {config.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return config

    def limited_to(self, max_model_len: int | None) -> "DecoderConfig":
        """The same for sequences of at most `max_model_len` tokens; None: as many as there are positions."""
        if max_model_len is None:
            return self
        return replace(self, ropes=tuple(rope and rope.limited_to(max_model_len) for rope in self.ropes))

    @property
    def is_like_llama(self) -> bool:
        """Whether the fused few-row kernels can compute a layer (decoder_layers.py, `forward_fused`)."""
        return (
            self.norm == "rms"
            and self.pre_norm
            and not self.post_norm
            and not self.parallel
            and self.residual_scale == 1.0
            and self.qk_norm in (None, "head")
            and self.qkv_clip is None
        )


def renamed(hf: dict[str, Any], **theirs: str) -> dict[str, Any]:
    """The config with the keys that `from_hf` reads, copied from the family's own keys."""
    return hf | {ours: hf[name] for ours, name in theirs.items() if hf.get(name) is not None}


def require(hf: dict[str, Any], *names: str) -> None:
    missing = [name for name in names if hf.get(name) is None]
    if missing:
        raise ValueError(f"the model's config lacks {', '.join(missing)}")


def choice(hf: dict[str, Any], name: str, *supported: str) -> str:
    """Of a config key; by default the first."""
    given = hf.get(name) or supported[0]
    if given not in supported:
        raise ValueError(f"{name} is {given!r}; supported for this architecture: {', '.join(supported)}")
    return given


def windows_by_layer_type(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's rule: a window only with use_sliding_window; layer_types, or all layers from max_window_layers on."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = [SLIDING if window and i >= first else FULL for i in range(hf["num_hidden_layers"])]
    return windows_of_types(types, window)


def windows_of_types(types: list[str], window: int | None) -> tuple[int | None, ...]:
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in types)


def layer_types(hf: dict[str, Any], full_every: int) -> list[str]:
    """As the config lists them; else every `full_every`-th layer has full attention, the others a window."""
    require(hf, "num_hidden_layers")
    listed: list[str] | None = hf.get("layer_types")
    return listed or [SLIDING if (i + 1) % full_every else FULL for i in range(hf["num_hidden_layers"])]


def ropes_by_layer_type(
    hf: dict[str, Any], types: list[str], head_dim: int, bases: dict[str, float]
) -> tuple[RopeParameters, ...]:
    """For families whose full and sliding layers have different rotary embeddings. A config with only one set of rope
    parameters (`rope_scaling`) means full layers; `bases` are the default thetas."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not any(kind in given for kind in bases):
        given = {FULL: given}
    ropes = {kind: {"rope_theta": base} | (given.get(kind) or {}) for kind, base in bases.items()}
    made = {kind: RopeParameters.from_hf(hf | {"rope_parameters": ropes}, head_dim, kind) for kind in ropes}
    return tuple(made[kind] for kind in types)
