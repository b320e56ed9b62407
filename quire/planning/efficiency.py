"""Shares of a GPU's peaks that steps reach, fitted by `python -m scripts.fit_plan` to cards of one H200."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Of the peaks: bandwidth of weights (of 16 bits, fp8, fewer bits) and of keys and values, arithmetic of linears,
    experts and prompts' attention. Of time: what a layer, its experts, a row and a request take however little they
    compute."""

    bandwidth: float = 0.83
    fp8_bandwidth: float = 0.71
    int_bandwidth: float = 0.49  # of 4 bits: unpacking takes longer than reading
    cache_bandwidth: float = 0.80
    flops: float = 0.745
    expert_flops: float = 0.58
    attention_flops: float = 0.32
    layer_s: float = 12.3e-6
    expert_layer_s: float = 10.3e-6
    row_s: float = 1.5e-6
    request_s: float = 1.9e-3


H200_FIT = Efficiency()
