"""Validates sizes in a model's config: kernels do not check them, so every config is checked before building."""

from typing import TYPE_CHECKING, Any

from quire.config.shown import shown
from quire.config.values import finite_number, whole_number
from quire.layers.rotary import MAX_POSITIONS, MAX_THETA

if TYPE_CHECKING:
    from quire.layers.latent_attention import LatentSizes
    from quire.layers.rotary import RopeParameters
    from quire.models.decoder_config import DecoderConfig

# Far above any model there is, and low enough that no product of them overflows.
MAX_LAYERS = 1024
MAX_HEADS = 2**16
MAX_HEAD_DIM = 1024
MAX_WIDTH = 2**22
MAX_VOCAB = 2**24
MAX_EXPERTS = 4096
MAX_PARAMETERS = 2**44
MAX_SCALE = 1e9

# Keys of all families; null and missing keys are handled by the family.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), MAX_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads"), MAX_HEADS),
    "head_dim": MAX_HEAD_DIM,
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "word_embed_proj_dim"), MAX_WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), MAX_WIDTH),
    "vocab_size": MAX_VOCAB,
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), MAX_EXPERTS),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts", "moe_k", "n_group", "topk_group"), MAX_EXPERTS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), MAX_WIDTH),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), MAX_HEAD_DIM),
    **dict.fromkeys(("moe_layer_freq", "moe_layer_interval"), MAX_LAYERS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), MAX_POSITIONS),
    **dict.fromkeys(("sliding_window_pattern", "decoder_sparse_step", "no_rope_layer_interval"), MAX_LAYERS),
}
COUNTS = {
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace", "moe_layer_start_index"), MAX_LAYERS),
    "num_nextn_predict_layers": MAX_LAYERS,
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), MAX_EXPERTS),
    "shared_expert_intermediate_size": MAX_WIDTH,
}
POSITIVE = ("query_pre_attn_scalar", "logits_scaling", "rope_theta", "rope_local_base_freq", "rotary_emb_base")
OBJECTS = ("rope_parameters", "rope_scaling")
LISTS = ("layer_types", "no_rope_layers", "mlp_only_layers")


def check_keys(hf: dict[str, Any]) -> None:
    """Check the keys of an HF config before the family reads them."""
    present = {name: value for name, value in hf.items() if value is not None}
    for name in SIZES.keys() & present.keys():
        whole_number(name, present[name], maximum=SIZES[name])
    for name in COUNTS.keys() & present.keys():
        whole_number(name, present[name], minimum=0, maximum=COUNTS[name])
    for name in present.keys() & set(POSITIVE):
        finite_number(name, present[name], above=0.0, maximum=MAX_THETA)
    for names, kind, called in ((OBJECTS, dict, "an object"), (LISTS, list, "a list")):
        for name in present.keys() & set(names):
            if not isinstance(present[name], kind):
                raise ValueError(f"{name} is {shown(present[name])}; it must be {called}")


def check_decoder(c: "DecoderConfig") -> None:
    """Check all sizes that a decoder is built with, read or derived."""
    sizes = {
        "vocab_size": (c.vocab_size, MAX_VOCAB),
        "hidden_size": (c.hidden_size, MAX_WIDTH),
        "intermediate_size": (c.intermediate_size, MAX_WIDTH),
        "num_hidden_layers": (c.num_layers, MAX_LAYERS),
        "num_attention_heads": (c.num_heads, MAX_HEADS),
        "num_key_value_heads": (c.num_kv_heads, MAX_HEADS),
        "head_dim": (c.head_dim, MAX_HEAD_DIM),
    }
    for name, (size, most) in sizes.items():
        whole_number(name, size, maximum=most)
    whole_number("max_position_embeddings", c.num_positions, minimum=0, maximum=MAX_POSITIONS)
    if c.num_heads % c.num_kv_heads:
        raise ValueError(
            f"num_attention_heads is {c.num_heads}, which num_key_value_heads, {c.num_kv_heads}, does not divide"
        )
    for name, each in (("layer_types", c.windows), ("the rotary parameters", c.ropes)):
        if len(each) != c.num_layers:
            raise ValueError(f"{name} names {len(each)} layers, num_hidden_layers is {c.num_layers}")
    for window in set(c.windows) - {None}:
        whole_number("sliding_window", window)
    for rope in set(c.ropes) - {None}:
        if rope is not None and rope.table_width > c.head_dim:
            raise ValueError(
                f"{rope.table_width} elements of each head are rotated, but head_dim is {c.head_dim}; "
                "partial_rotary_factor and head_dim must give an even number that is not larger"
            )
    if c.latent is not None:
        _check_latent(c.latent, c.ropes)
    _check_numbers(c)
    if (count := count_parameters(c)) > MAX_PARAMETERS:
        raise ValueError(f"the model's config specifies {count:,} parameters; at most {MAX_PARAMETERS:,} are supported")


def _check_latent(sizes: "LatentSizes", ropes: "tuple[RopeParameters | None, ...]") -> None:
    ranks = {"kv_lora_rank": sizes.rank} | ({} if sizes.q_rank is None else {"q_lora_rank": sizes.q_rank})
    heads = {"qk_nope_head_dim": sizes.nope, "qk_rope_head_dim": sizes.rope, "v_head_dim": sizes.v}
    for names, most in ((ranks, MAX_WIDTH), (heads, MAX_HEAD_DIM)):
        for name, size in names.items():
            whole_number(name, size, maximum=most)
    if sizes.rope % 2 or any(rope is None or rope.rotary_dim != sizes.rope for rope in ropes):
        raise ValueError(f"qk_rope_head_dim is {sizes.rope}; it must be even, and all of it is rotated")


def _check_numbers(c: "DecoderConfig") -> None:
    scales = {
        "embedding_multiplier": c.embed_scale,
        "logit_scale": c.logit_scale,
        "residual_multiplier": c.residual_scale,
        "attention_multiplier": 1.0 if c.attention_scale is None else c.attention_scale,
        "alibi": c.alibi,
    }
    for name, scale in scales.items():
        finite_number(name, scale, above=-MAX_SCALE, maximum=MAX_SCALE)
    finite_number("the epsilon of norms (rms_norm_eps, layer_norm_eps)", c.norm_eps, above=-1e-30, maximum=1e3)
    limits = {
        "final_logit_softcapping": c.logit_softcap,
        "attn_logit_softcapping": c.attention_softcap,
        "clip_qkv": c.qkv_clip,
    }
    for name, limit in limits.items():
        if limit is not None:
            finite_number(name, limit, above=0.0, maximum=MAX_SCALE)


def count_parameters(c: "DecoderConfig") -> int:
    """Without experts."""
    attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    layer = attention + c.hidden_size * c.intermediate_size * (3 if c.gated else 2)
    return c.hidden_size * (2 * c.vocab_size + c.num_positions) + c.num_layers * layer
