"""MPNet."""

import math
from typing import Any, ClassVar

import torch

from quire.layers.encoder_attention import EncoderAttention
from quire.layers.load_slot import LoadSlot, ShardId, new_parameter
from quire.models.bert import CLASSIFIER, ROBERTA_UNUSED, BertModel, RobertaModel, bert_weights
from quire.models.decoder_config import ModuleNames, renamed
from quire.models.encoder_config import EncoderConfig, Task
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.options import ModelOptions

NAMES = ModuleNames(
    "encoder.layer.{i}", "attention.attn", ("q", "k", "v"), "o", "intermediate", ("dense",), "output.dense"
)
FIRST_POSITION = 2  # behind the padding token's, which is fixed
NUM_BUCKETS = 32
MAX_DISTANCE = 128  # from which on all are in one bucket


class MPNetModel(BertModel):
    """BERT without token types, whose scores have a bias by the distance of query and key."""

    heads = RobertaModel.heads
    head_rules: ClassVar[dict[Task, tuple[Rule, ...]]] = {
        "sequence": RobertaModel.head_rules["sequence"],
        "token": (CLASSIFIER,),
    }
    weights: ClassVar[WeightMap] = bert_weights(
        "mpnet.",
        Rule("mpnet.encoder.relative_attention_bias.weight", "distances.weight"),
        names=NAMES,
        norms=("attention.LayerNorm", "output.LayerNorm"),
    ).ignoring("mpnet.pooler.dense.{p}", *ROBERTA_UNUSED)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> EncoderConfig:
        hf = renamed({"layer_norm_eps": 1e-12, "hidden_act": "gelu"} | hf, rms_norm_eps="layer_norm_eps")
        if (hf.get("relative_attention_num_buckets") or NUM_BUCKETS) != NUM_BUCKETS:
            raise ValueError(f"relative_attention_num_buckets must be {NUM_BUCKETS}, which MPNet's formula has")
        return cls.encoder_config(
            hf,
            names=NAMES,
            num_positions=hf["max_position_embeddings"] - FIRST_POSITION,
            position_offset=FIRST_POSITION,
            num_token_types=0,
            num_buckets=NUM_BUCKETS,
        )

    def __init__(self, hf: dict[str, Any], options: ModelOptions) -> None:
        super().__init__(hf, options)
        self.rank = options.tp.rank
        self.distances = Distances(self.config.num_buckets, self.config.num_heads, options.device)

    def process_after_loading(self) -> None:
        super().process_after_loading()
        bias = self.distances.by_distance(self.config.num_positions)
        for module in self.layers.modules():
            if isinstance(module, EncoderAttention):
                heads = module.shape.num_heads
                module.bias = bias[heads * self.rank : heads * (self.rank + 1)].contiguous()


class Distances(torch.nn.Module):
    """A bias for each head and bucket of distances between query and key."""

    def __init__(self, buckets: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(buckets, heads, dtype=torch.float32, device=device)

    def load_slots(self) -> dict[tuple[str, ShardId], LoadSlot]:
        return {("weight", None): LoadSlot(self.weight.data, tuple(self.weight.shape))}

    def by_distance(self, longest: int) -> torch.Tensor:
        """[heads, 2 * longest - 1]: of keys from longest - 1 before the query to as many behind it."""
        # Half of the buckets are for later keys; of each half, half for one distance each, the rest logarithmic.
        distance = torch.arange(1 - longest, longest, device=self.weight.device)
        buckets = NUM_BUCKETS // 2
        exact = buckets // 2
        size = distance.abs()
        growth = (size.clamp(min=1).float() / exact).log() / math.log(MAX_DISTANCE / exact)
        large = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        bucket = torch.where(size < exact, size, large) + buckets * (distance > 0)
        return self.weight.data[bucket].T.contiguous()
