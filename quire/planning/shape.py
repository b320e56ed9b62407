"""A model's sizes as its config.json gives them, without torch or the model's code."""

from dataclasses import dataclass
from typing import Any

from quire.checkpoint.config import text_part
from quire.config.shown import shown
from quire.config.values import whole_number

MAX_SIZE, MAX_LAYERS = 2**24, 1024
LAYERS = "layers"
NAMES = {
    "hidden size": ("hidden_size", "n_embd", "n_embed"),
    LAYERS: ("num_hidden_layers", "n_layer"),
    "attention heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
UNGATED = ("gpt2", "gpt_neox", "falcon", "opt", "starcoder2")
TIED = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "opt",
    "falcon",
    "starcoder2",
    "cohere",
    "cohere2",
    "ernie4_5_moe",
)
HEAD_SIZES = {"gemma": 256, "gemma2": 256, "gemma3": 256, "gemma3_text": 256, "gpt_oss": 64, "glm": 128, "glm4": 128}
# Of families that mix windows: every so manieth layer has full attention, unless layer_types says otherwise.
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4}
WINDOWED = ("mistral", "mixtral", "phi3", "starcoder2", "dots1")  # every layer, if the config has a sliding_window
ONE_WIDTH = ("mixtral", "olmoe", "granitemoe", "gpt_oss")  # experts are as wide as intermediate_size says
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNPLANNED = {  # keys of models whose cache or layers are of another kind
    "state_size": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
    "is_encoder_decoder": "an encoder",
}


@dataclass(frozen=True)
class Experts:
    count: int
    top_k: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class Latent:
    """Of latent attention (MLA)."""

    q_rank: int  # 0: queries are not compressed
    rank: int
    nope: int
    rope: int
    v: int
    index_heads: int = 0  # of the index that selects tokens; 0: there is none
    index_size: int = 0

    @property
    def width(self) -> int:
        """Of a token's latent."""
        return self.rank + self.rope


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_size: int
    width: int  # of a dense MLP
    gated: bool
    tied: bool
    windows: tuple[int | None, ...]  # per layer; None: full attention
    sparse: tuple[bool, ...]  # per layer: experts in place of the MLP
    experts: Experts | None
    positions: int = 0  # learned position embeddings
    dtype_bytes: int = 2
    latent: Latent | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def matrices(self) -> int:
        """Of an MLP or expert."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Of a layer's projections; norms and biases are left out, here and below."""
        return self.attention_of_rank(1)

    def attention_of_rank(self, tensor: int) -> int:
        """KV heads are repeated if there are fewer than ranks, what is compressed always."""
        heads, m = self.heads // tensor, self.latent
        if m is None:
            return self.hidden * self.head_size * 2 * (heads + max(1, self.kv_heads // tensor))
        queries = heads * (m.nope + m.rope)
        queries = m.q_rank * (self.hidden + queries) if m.q_rank else self.hidden * queries
        index = self.hidden * (m.index_size + m.index_heads) + m.q_rank * m.index_heads * m.index_size
        return index + queries + self.hidden * m.width + heads * (m.rank * (m.nope + m.v) + m.v * self.hidden)

    @property
    def attention_outputs(self) -> int:
        return self.heads * (self.head_size if self.latent is None else self.latent.v)

    def mlp_parameters(self, layer: int) -> int:
        """Of a layer's MLP, or of all its experts."""
        if not self.sparse[layer] or self.experts is None:
            return self.matrices * self.hidden * self.width
        experts = self.experts
        return self.matrices * self.hidden * (experts.count * experts.width + experts.shared_width)

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * (self.vocab * (1 if self.tied else 2) + self.positions)

    @property
    def parameters(self) -> int:
        router = 0 if self.experts is None else self.hidden * self.experts.count * sum(self.sparse)
        layers = sum(self.attention_parameters + self.mlp_parameters(i) for i in range(self.num_layers))
        return self.embedding_parameters + layers + router

    @property
    def active_parameters(self) -> int:
        """That compute a token; the embedding only looks it up."""
        idle = 0
        if self.experts is not None:
            unused = self.experts.count - self.experts.top_k
            idle = self.matrices * self.hidden * self.experts.width * unused * sum(self.sparse)
        lookup = self.hidden * (0 if self.tied else self.vocab)
        return self.parameters - idle - lookup


def read_shape(hf_config: dict[str, Any]) -> ModelShape:
    """The sizes in a config.json. ValueError where it has none, or describes layers of another kind."""
    try:
        return _read(text_part(hf_config))
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the model's config has a value of a wrong type: {error}") from error


def _read(hf: dict[str, Any]) -> ModelShape:
    for key, kind in UNPLANNED.items():
        if hf.get(key):
            raise ValueError(f"the model has {kind} ({key}), which cannot be planned yet; allowed: attention decoders")
    kind = str(hf.get("model_type") or "")
    hidden, layers, heads, vocab = (_size(hf, names, what) for what, names in NAMES.items())
    stated = _first(hf, INTERMEDIATE)
    width = 4 * hidden if stated is None else whole_number(INTERMEDIATE[0], stated, maximum=MAX_SIZE)
    latent = _latent(hf)
    kv_heads = _kv_heads(hf, kind, heads) if latent is None else heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads is {heads}, which num_key_value_heads, {kv_heads}, does not divide")
    head_size = whole_number("head_dim", hf.get("head_dim") or HEAD_SIZES.get(kind) or max(1, hidden // heads))
    head_size = head_size if latent is None else latent.nope + latent.rope
    experts = _experts(hf, kind)
    positions = _first(hf, ("max_position_embeddings", "n_positions")) if kind in ("gpt2", "opt") else 0
    return ModelShape(
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        width=width,
        gated=kind not in UNGATED,
        tied=bool(hf.get("tie_word_embeddings", kind in TIED)),
        windows=_windows(hf, kind, layers),
        sparse=_sparse(hf, layers, experts),
        experts=experts,
        positions=positions or 0,
        dtype_bytes=DTYPE_BYTES.get(_dtype(hf), 2),
        latent=latent,
    )


def _first(hf: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((hf[name] for name in names if hf.get(name) is not None), None)


def _size(hf: dict[str, Any], names: tuple[str, ...], what: str) -> int:
    found = _first(hf, names)
    if found is None:
        raise ValueError(f"the model's config does not say its {what}; it must have {' or '.join(names)}")
    return whole_number(names[0], found, maximum=MAX_LAYERS if what == LAYERS else MAX_SIZE)


def _kv_heads(hf: dict[str, Any], kind: str, heads: int) -> int:
    if kind == "falcon" and not hf.get("new_decoder_architecture"):
        return 1 if hf.get("multi_query", True) else heads
    return whole_number(KV_HEADS[0], _first(hf, KV_HEADS) or heads, maximum=MAX_SIZE)


def _latent(hf: dict[str, Any]) -> Latent | None:
    if not hf.get("kv_lora_rank"):
        return None
    v = hf.get("v_head_dim") or _size(hf, NAMES["hidden size"], "") // _size(hf, NAMES["attention heads"], "")
    given = {name: hf.get(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
    rank, nope, rope = (whole_number(name, value, maximum=MAX_SIZE) for name, value in given.items())
    q_rank = whole_number("q_lora_rank", hf.get("q_lora_rank") or 0, minimum=0, maximum=MAX_SIZE)
    index = (0, 0)
    if hf.get("index_topk"):
        heads, size = (whole_number(key, hf.get(key), maximum=MAX_SIZE) for key in ("index_n_heads", "index_head_dim"))
        index = (heads, size)
    return Latent(q_rank, rank, nope, rope, whole_number("v_head_dim", v, maximum=MAX_SIZE), *index)


def _dtype(hf: dict[str, Any]) -> str:
    stated = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return "bfloat16" if stated == "float32" else stated  # served in bfloat16 on GPUs (--dtype auto)


def _experts(hf: dict[str, Any], kind: str) -> Experts | None:
    count = _first(hf, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    if not count:
        return None
    own = () if kind in ONE_WIDTH else ("moe_intermediate_size",)
    width = _first(hf, (*own, *INTERMEDIATE))
    top_k = whole_number("num_experts_per_tok", _first(hf, ("num_experts_per_tok", "moe_k")))
    if top_k > whole_number("num_experts", count):
        raise ValueError(f"num_experts_per_tok is {top_k}; there are {count} experts (num_experts)")
    shared = whole_number("shared_expert_intermediate_size", hf.get("shared_expert_intermediate_size") or 0, minimum=0)
    width = whole_number("moe_intermediate_size", width, maximum=MAX_SIZE)
    number = _first(hf, ("n_shared_experts", "moe_num_shared_experts")) or 0
    shared += width * whole_number("n_shared_experts", number, minimum=0, maximum=MAX_SIZE)
    return Experts(count, top_k, width, shared)


def _sparse(hf: dict[str, Any], layers: int, experts: Experts | None) -> tuple[bool, ...]:
    dense, types = hf.get("mlp_only_layers") or [], hf.get("mlp_layer_types")
    if types is not None and len(types) == layers:
        return tuple(experts is not None and kind == "sparse" for kind in types)
    every = whole_number("decoder_sparse_step", _first(hf, ("decoder_sparse_step", "moe_layer_interval")) or 1)
    start = _first(hf, ("first_k_dense_replace", "moe_layer_start_index")) or 0
    first = whole_number("first_k_dense_replace", start, minimum=0)
    freq = whole_number("moe_layer_freq", hf.get("moe_layer_freq") or 1)
    return tuple(
        experts is not None and i >= first and i % freq == 0 and i not in dense and (i + 1) % every == 0
        for i in range(layers)
    )


def _windows(hf: dict[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window")
    if kind in FULL_EVERY:
        window = window or {"gpt_oss": 128}.get(kind, 4096)
    elif not (kind in WINDOWED or hf.get("use_sliding_window")):
        window = None
    if window is None:
        return (None,) * layers
    whole_number("sliding_window", window)
    types = hf.get("layer_types")
    if types is None:
        every = hf.get("sliding_window_pattern") or FULL_EVERY.get(kind)
        late = kind == "dots1" or (kind.startswith("qwen") and kind != "qwen3_moe")
        first = hf.get("max_window_layers", 28) if late else 0
        full = [i < first if every is None else (i + 1) % every == 0 for i in range(layers)]
    else:
        full = [name == "full_attention" for name in types]
    if len(full) != layers:
        raise ValueError(f"layer_types names {shown(len(full))} layers, num_hidden_layers is {layers}")
    return tuple(None if each else window for each in full)
