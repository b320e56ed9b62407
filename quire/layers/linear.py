"""Linear layers: the one place where quantization and tensor parallelism meet."""

import torch
from torch import nn

from quire.kernels.activation import activate, activate_mul
from quire.kernels.rms_norm import RMSNormParams
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.layers.norm import LayerNorm, Norm
from quire.layers.parallel import SINGLE, TensorParallel
from quire.quantization.base import GatedLinearMethod, LinearMethod, Partition
from quire.quantization.encoder_linear import EncoderLinearMethod
from quire.quantization.unquantized import UnquantizedLinearMethod


class ParallelLinear(nn.Module):
    """Base of the parallel linears: a weight and bias of output partitions, and the method that multiplies."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    leaves_panels_only = True  # after loading, if the method does: see models/loading/packed_cache.py

    def __init__(
        self,
        in_features: int,
        out_partition_sizes: list[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.method = method or UnquantizedLinearMethod()
        self.in_features = in_features
        self.out_partition_sizes = out_partition_sizes
        self.method.create_weights(self, in_features, out_partition_sizes, dtype, device)
        self.bias = new_parameter(sum(out_partition_sizes), dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x, self.bias)

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(forward(x))"""
        if isinstance(self.method, EncoderLinearMethod):
            return self.method.apply_activated(self, x, self.bias, activation)
        return activate(self(x), activation)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up: outputs are [gate; up]."""
        if isinstance(self.method, GatedLinearMethod):
            return self.method.apply_gated(self, x, self.bias, activation)
        return activate_mul(self(x), activation)

    def fused(
        self,
        x: torch.Tensor,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """See LinearMethod.apply_fused and can_fuse."""
        return self.method.apply_fused(self, x, self.bias, norm, residual, silu)

    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)

    def partitions(self) -> list[Partition]:
        """The linear layers of the checkpoint that this one consists of."""
        raise NotImplementedError


class ColumnPartitionedLinear(ParallelLinear):
    """One whose outputs are split among workers. `shards`: (shard, outputs of all workers, this worker's first)."""

    shards: list[tuple[ShardId, int, int]]

    def partitions(self) -> list[Partition]:
        found, offset = [], 0
        for (shard, total, start), size in zip(self.shards, self.out_partition_sizes, strict=True):
            found.append(Partition(shard, offset, size, (total, self.in_features), 0, start))
            offset += size
        return found

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        partitions = self.partitions()
        slots = self.method.load_slots(self, partitions)
        if self.bias is not None:
            for p in partitions:
                part = self.bias.data.narrow(0, p.offset, p.size)
                slots["bias", p.shard] = LoadSlot(part, p.full_shape[:1], 0, p.start, "zeros")
        return slots


class MergedColumnParallelLinear(ColumnPartitionedLinear):
    """Several linears of the same input as one; outputs of each are split among workers."""

    def __init__(
        self,
        in_features: int,
        out_features: list[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        sizes = [tp.share(n, "output features") for n in out_features]
        super().__init__(in_features, sizes, bias, dtype, device, method)
        self.shards = [
            (i, total, size * tp.rank) for i, (total, size) in enumerate(zip(out_features, sizes, strict=True))
        ]


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Outputs split among workers."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(in_features, [out_features], bias, dtype, device, tp, method)
        _, total, start = self.shards[0]
        self.shards = [(None, total, start)]


class QKVParallelLinear(ColumnPartitionedLinear):
    """Query, key and value projections as one; heads split among workers, KV heads repeated if there are too few."""

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        self.num_heads = tp.share(num_heads, "attention heads")
        first_kv_head, self.num_kv_heads = tp.share_of_kv_heads(num_kv_heads)
        sizes = [n * head_size for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        super().__init__(hidden_size, sizes, bias, dtype, device, method)
        kv_total, kv_start = num_kv_heads * head_size, first_kv_head * head_size
        self.shards = [
            ("q", num_heads * head_size, sizes[0] * tp.rank),
            ("k", kv_total, kv_start),
            ("v", kv_total, kv_start),
        ]


class QueryAndLatentLinear(ColumnPartitionedLinear):
    """Of latent attention: queries, whose heads are split among workers, or the vector that they are compressed to, and
    the latents. What is compressed every worker has whole."""

    def __init__(
        self,
        hidden_size: int,
        queries: int,
        latent: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        method: LinearMethod | None = None,
        compressed: bool = True,
    ) -> None:
        share = queries if compressed else tp.share(queries, "features of queries")
        super().__init__(hidden_size, [share, latent], bias, dtype, device, method)
        self.shards = [("q", queries, 0 if compressed else share * tp.rank), ("kv", latent, 0)]


class RowParallelLinear(ParallelLinear):
    """Inputs split among workers, outputs summed over them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        self.local_in = tp.share(in_features, "input features")
        super().__init__(self.local_in, [out_features], bias, dtype, device, method)
        self.tp = tp
        self.full_shape = (out_features, in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One worker adds the bias, or the sum would hold it once per worker.
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.all_reduce(self.method.apply(self, x, bias))

    def normed_sum(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """norm(residual + forward(x)); `residual` may be overwritten."""
        if self.tp.size == 1 and isinstance(self.method, EncoderLinearMethod) and isinstance(norm, LayerNorm):
            return self.method.apply_normed_sum(self, x, self.bias, residual, norm.params)
        return norm.add(self(x), residual)[0]

    def fused(
        self,
        x: torch.Tensor,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        """One worker adds the residual, for the same reason as the bias."""
        if self.tp.rank == 0:
            return self.tp.all_reduce(self.method.apply_fused(self, x, self.bias, norm, residual, silu))
        return self.tp.all_reduce(self.method.apply_fused(self, x, None, norm, None, silu))

    def partitions(self) -> list[Partition]:
        return [Partition(None, 0, self.full_shape[0], self.full_shape, 1, self.local_in * self.tp.rank)]

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        slots = self.method.load_slots(self, self.partitions())
        if self.bias is not None:
            slots["bias", None] = LoadSlot(self.bias.data, self.full_shape[:1], dummy="zeros")
        return slots


def can_fuse(*linears: ParallelLinear) -> bool:
    """Whether all have `fused`; known once weights are loaded."""
    return all(linear.method.can_fuse(linear) for linear in linears)


def can_fuse_terms(*linears: ParallelLinear) -> bool:
    """Whether `fused` is for steps with adapters, too: those that take none do not care."""
    return all(getattr(linear.method, "fuses_terms", True) for linear in linears)
