"""How long a step takes: the slower of reading and computing, part by part, and what does not shrink with either."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.planning.efficiency import H200_FIT, Efficiency
from quire.planning.gpus import GPU
from quire.planning.memory import CACHE_DTYPES, Limits, head_bytes, kv_heads_of_rank, layer_bytes
from quire.planning.shape import ModelShape
from quire.planning.sizes import SINGLE, Layout, stage_ranges
from quire.planning.weight_format import WeightFormat


@dataclass
class Step:
    """What a step computes, summed over its requests; by window, as layers differ in what they see."""

    tokens: int = 0
    rows: int = 0  # requests
    decode_keys: dict[int | None, float] = field(default_factory=dict)  # read from the cache by single tokens
    prompt_pairs: dict[int | None, float] = field(default_factory=dict)  # of a query and a key, of longer chunks

    def add(self, windows: Iterable[int | None], new: int, before: int, count: int = 1) -> None:
        """`count` requests that compute `new` tokens behind `before` others."""
        self.tokens += count * new
        self.rows += count
        for window in windows:
            if new == 1:
                keys = before + 1 if window is None else min(before + 1, window)
                self.decode_keys[window] = self.decode_keys.get(window, 0.0) + count * keys
            else:
                pairs = _pairs(new, before, window)
                self.prompt_pairs[window] = self.prompt_pairs.get(window, 0.0) + count * pairs


def _pairs(new: int, before: int, window: int | None) -> float:
    """The sum of min(before + i, window) for i = 1 ... new."""
    if window is None or before + new <= window:
        return new * before + new * (new + 1) / 2
    growing = max(0, window - before)
    return growing * before + growing * (growing + 1) / 2 + (new - growing) * window


@dataclass(frozen=True)
class Roofline:
    """A model on the ranks of a layout."""

    shape: ModelShape
    weights: WeightFormat
    gpu: GPU
    layout: Layout = SINGLE
    cache_dtype: str = "auto"
    share: Efficiency = H200_FIT

    def __post_init__(self) -> None:
        Limits(1, cache_dtype=self.cache_dtype)  # checks it

    @property
    def windows(self) -> set[int | None]:
        return set(self.shape.windows)

    def decode(self, batch: int, context: int) -> Step:
        step = Step()
        step.add(self.windows, 1, context - 1, batch)
        return step

    def prompt(self, length: int, before: int = 0) -> Step:
        step = Step()
        step.add(self.windows, length, before)
        return step

    def step_seconds(self, step: Step, layers: range | None = None, head: bool = True) -> float:
        """On one stage: `layers`, by default all."""
        layers = range(self.shape.num_layers) if layers is None else layers
        return self._linears(step, layers) + self._attention(step, layers) + self._rest(step, layers, head)

    def _flops(self, experts: bool = False) -> float:
        peak = self.gpu.fp8_flops if self.weights.fp8_compute else self.gpu.flops
        return peak * (self.share.expert_flops if experts else self.share.flops)

    def _weight_bandwidth(self, quantized: bool) -> float:
        share = self.share.bandwidth
        if quantized and self.weights.bits < 16:
            share = self.share.fp8_bandwidth if self.weights.bits >= 8 else self.share.int_bandwidth
        return self.gpu.bandwidth * share

    def _linears(self, step: Step, layers: range) -> float:
        shape, tensor = self.shape, self.layout.tensor
        dense, routed = self._weight_bandwidth(not self.weights.experts_only), self._weight_bandwidth(True)
        total = 0.0
        for kind, count in Counter(shape.sparse[layers.start : layers.stop]).items():
            layer = shape.sparse.index(kind)
            size = layer_bytes(shape, self.weights, layer, tensor)
            products: float = shape.attention_of_rank(tensor)
            seconds = 0.0
            if kind and shape.experts is not None:
                each = shape.matrices * shape.hidden * shape.experts.width / tensor
                stored = each * self.weights.bits / 8
                size -= shape.experts.count * stored
                # Tokens choose independently: an expert that none of them chose is not read.
                unused = (1 - shape.experts.top_k / shape.experts.count) ** step.tokens
                read = shape.experts.count * (1 - unused) * stored
                computed = 2 * each * shape.experts.top_k * step.tokens
                seconds += max(read / routed, computed / self._flops(experts=True))
                products += shape.matrices * shape.hidden * shape.experts.shared_width / tensor
            else:
                products += shape.mlp_parameters(layer) / tensor
            seconds += max(size / dense, 2 * products * step.tokens / self._flops())
            total += count * seconds
        return total

    def _attention(self, step: Step, layers: range) -> float:
        shape, tensor = self.shape, self.layout.tensor
        dtype = CACHE_DTYPES[self.cache_dtype]
        item = shape.dtype_bytes if dtype is None else 1 if dtype.startswith("float8") else 2
        key_bytes = 2 * kv_heads_of_rank(shape, tensor) * shape.head_size * item
        pair_flops = 4 * shape.heads / tensor * shape.head_size
        if shape.latent is not None:
            key_bytes = (shape.latent.width + shape.latent.index_size) * item  # on every rank
            pair_flops = 2 * shape.heads / tensor * (shape.head_size + shape.latent.v)
        total = 0.0
        for window, count in Counter(shape.windows[layers.start : layers.stop]).items():
            keys, pairs = step.decode_keys.get(window, 0.0), step.prompt_pairs.get(window, 0.0)
            seconds = keys * key_bytes / (self.gpu.bandwidth * self.share.cache_bandwidth)
            total += count * (seconds + pairs * pair_flops / (self.gpu.flops * self.share.attention_flops))
        return total

    def _rest(self, step: Step, layers: range, head: bool) -> float:
        """Element-wise work, the head, overheads and communication."""
        shape, tensor, share = self.shape, self.layout.tensor, self.share
        bandwidth = self.gpu.bandwidth * share.bandwidth
        total = 0.0
        for kind, count in Counter(shape.sparse[layers.start : layers.stop]).items():
            total += count * (step.tokens * self._element_bytes(kind) / bandwidth + share.layer_s)
            total += count * kind * share.expert_layer_s
        total += 2 * len(layers) * self.all_reduce_seconds(step.tokens * shape.hidden * shape.dtype_bytes)
        if head:
            size = head_bytes(shape, tensor)
            products = 2 * shape.hidden * shape.vocab / tensor * step.rows
            total += max(size / bandwidth, products / self._peak_of_head()) + step.rows * share.row_s
            total += self.all_reduce_seconds(step.rows * shape.vocab * shape.dtype_bytes / 2)  # a gather: half of it
        return total

    def _peak_of_head(self) -> float:
        return self.gpu.flops * self.share.flops

    def _element_bytes(self, sparse: bool) -> float:
        """Of a token and layer, read and written between products: norms and sums, rotation, activation."""
        shape, tensor = self.shape, self.layout.tensor
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size / tensor
        values = 8 * shape.hidden + 2 * qkv + 2 * shape.heads * shape.head_size / tensor
        if sparse and shape.experts is not None:
            inner = shape.experts.top_k * shape.experts.width + shape.experts.shared_width
            values += shape.matrices * inner / tensor + 3 * shape.experts.top_k * shape.hidden
        else:
            values += shape.matrices * shape.width / tensor
        return values * shape.dtype_bytes

    def all_reduce_seconds(self, size: float) -> float:
        ranks, link = self.layout.tensor, self.gpu.link
        return 0.0 if ranks == 1 else link.latency_s + 2 * (ranks - 1) / ranks * size / link.bytes_per_s

    def hand_over_seconds(self, tokens: int) -> float:
        """Of hidden states and residual, to the next stage."""
        link = self.gpu.link
        return link.latency_s + 2 * tokens * self.shape.hidden * self.shape.dtype_bytes / link.bytes_per_s

    def _stages(self, step: Step) -> list[float]:
        stages = stage_ranges(self.shape.num_layers, self.layout.stages)
        return [self.step_seconds(step, layers, head=layers is stages[-1]) for layers in stages]

    def token_seconds(self, batch: int, context: int) -> float:
        """Between two tokens of each of `batch` requests, which stages share as micro-batches."""
        stages = self.layout.stages
        micro = -(-batch // stages)
        step = self.decode(micro, context)
        times = self._stages(step)
        passing = (stages - 1) * self.hand_over_seconds(micro)
        in_flight = -(-batch // micro)
        return max(sum(times) + passing, in_flight * max(times))

    def first_token_seconds(self, prompt_len: int, chunk: int) -> float:
        """Of one request, on an idle engine, whose prompt is computed in steps of at most `chunk` tokens."""
        total, done = self.share.request_s, 0
        while done < prompt_len:
            new = min(chunk, prompt_len - done)
            total += sum(self._stages(self.prompt(new, done)))
            total += (self.layout.stages - 1) * self.hand_over_seconds(new)
            done += new
        return total

    def prompt_tokens_per_second(self, prompt_len: int, chunk: int) -> float:
        """Of many requests: stages overlap, and steps hold prompts up to `chunk` tokens."""
        requests = max(1, chunk // prompt_len)
        step, done = Step(), 0
        total = 0.0
        while done < prompt_len:
            new = min(chunk, prompt_len - done)
            step = Step()
            step.add(self.windows, new, done, requests)
            total += max(self._stages(step))
            done += new
        return requests * prompt_len / total

    def serving_tokens_per_second(self, batch: int, prompt_len: int, output_len: int, chunk: int) -> float:
        """Output tokens of requests that begin as others end: their prompts take their share of the time."""
        decode = output_len * self.token_seconds(batch, prompt_len + output_len // 2)
        prompts = batch * prompt_len / self.prompt_tokens_per_second(prompt_len, chunk)
        return batch * output_len / (decode + prompts)
