"""A language model with an encoder: one file and one registration."""

import torch

from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry

ARCHITECTURE = "LlamaWithEncoderForCausalLM"
KIND = "image"
CHANNELS, PATCHES_PER_TOKEN = 6, 4


def weights(hidden):
    return torch.randn(PATCHES_PER_TOKEN * CHANNELS, hidden, generator=torch.Generator().manual_seed(7)) * 0.05


def encode(data, weight):
    """Patches [4 * length, channels] -> [length, hidden]; every token depends on all patches."""
    mixed = data + data.mean(0)
    return torch.tanh(mixed.reshape(-1, PATCHES_PER_TOKEN * CHANNELS) @ weight)


class LlamaWithEncoder(LlamaForCausalLM):
    feature_kinds = (KIND,)

    def __init__(self, hf, options):
        super().__init__(hf, options)
        weight = weights(self.hidden_size).to(options.device, options.dtype)
        self.register_buffer("encoder", weight, persistent=False)
        self.num_encoded = 0
        self.failures = 0  # that are still to come

    def encode(self, kind, data):
        assert kind == KIND
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the encoder is out of order")
        self.num_encoded += len(data)
        return [encode(one.to(self.encoder.dtype), self.encoder) for one in data]


ModelRegistry.register_model(ARCHITECTURE, LlamaWithEncoder)
