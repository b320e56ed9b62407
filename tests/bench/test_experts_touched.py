"""The card counts the experts that a step touches."""

import json

from quire import LLM
from quire.bench.internal.card.experts import experts_touched
from quire.bench.workloads import TINY_SHAPE

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_experts_touched(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_SHAPE | EXPERTS))
    limits = {"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, **limits) as llm:
        found = experts_touched(llm, TINY_SHAPE["vocab_size"])
    assert found["batch 1"] == 2 and len(found["layers"]) == 2
    assert 0.9 * found["uniform"] < found["batch 256"] <= 32
