"""With dummy weights, experts are used about as evenly as uniform routing would use them."""

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.moe_routing import Routing, route_torch
from quire.models.loading.weight_loader import init_dummy_weights
from quire.models.moe import Router, SparseMLP
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from tests.models.helpers import CPU, TinyRunner
from tests.tiny_models import COMMON, DEEPSEEK_EXPERTS, EXPERTS

V2_LITE, V3 = (64, 2048, Routing(6)), (256, 7168, Routing(8, "sigmoid", groups=8, top_groups=4, group_score="top2_sum"))


def expected(count: int, top_k: int, tokens: int) -> float:
    return count * (1 - (1 - top_k / count) ** tokens)


@pytest.mark.parametrize(("count", "hidden", "routing"), [V2_LITE, V3], ids=["V2-Lite", "V3"])
def test_routers_use_all_experts_about_equally(count, hidden, routing):
    torch.manual_seed(1)
    router = Router(hidden, count, False, torch.bfloat16, CPU)
    init_dummy_weights(torch.nn.ModuleDict({"router": router}))
    x = F.rms_norm(torch.randn(4096, hidden), (hidden,))
    experts = route_torch(F.linear(x, router.weight.float()), routing)[1]
    used = torch.bincount(experts.flatten(), minlength=count)
    mean = 4096 * routing.top_k / count
    assert used.min() > 0.6 * mean and used.max() < 1.5 * mean
    for tokens in (16, 256):
        assert len(experts[:tokens].unique()) == pytest.approx(expected(count, routing.top_k, tokens), rel=0.1)


@pytest.mark.parametrize(
    ("architecture", "keys"), [("Qwen3Moe", EXPERTS | {"num_experts": 32}), ("Glm4Moe", DEEPSEEK_EXPERTS)]
)
def test_a_batch_of_random_tokens_touches_as_many_as_uniform_routing(architecture, keys):
    torch.manual_seed(0)
    hf = COMMON | {"architectures": [f"{architecture}ForCausalLM"], "head_dim": 16} | keys
    model = model_class(hf)(hf, ModelOptions(torch.float32, CPU))
    init_dummy_weights(model)
    model.process_after_loading()
    layers = [module for module in model.modules() if isinstance(module, SparseMLP)]
    logits: list[torch.Tensor] = []
    for layer in layers:
        layer.router.register_forward_hook(lambda module, given, made: logits.append(made))
    prompts = torch.randint(1, COMMON["vocab_size"], (64, 4)).tolist()
    TinyRunner(model, 64).step(list(enumerate(prompts)))
    for layer, found in zip(layers, logits, strict=True):
        routing = layer.experts.routing.with_shared(0)
        touched = len(route_torch(found[3::4], routing)[1].unique())
        assert touched >= 0.85 * expected(found.shape[1], routing.top_k, 64)
