"""What heads that draft from a model's hidden states share (EAGLE, multi-token prediction)."""

from collections.abc import Callable

import torch
from torch import nn

from quire.attention.base import Angles, ForwardContext
from quire.kernels.add import add
from quire.kernels.packed_linear import Multiply, Panels, pack_weight
from quire.layers.cache_layer import CacheLayer
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import ColumnParallelLinear, ParallelLinear
from quire.layers.rotary import RotaryEmbedding
from quire.models.base import FINAL
from quire.models.decoder import DecoderModel, HasProcessAfterLoading
from quire.models.decoder_config import DecoderConfig
from quire.models.decoder_layers import MLP, BuildContext, DecoderLayer, FeedForward
from quire.models.options import ModelOptions
from quire.quantization.unquantized import UnquantizedLinearMethod


class DraftHead(nn.Module):
    """Layers that continue the target's hidden states: at position p they see the one there and the token at p + 1, and
    predict the token at p + 2. Embedding and LM head are the target's unless the head's checkpoint has its own."""

    hidden_outputs: tuple[int | str, ...] = (FINAL,)

    def __init__(
        self,
        config: DecoderConfig,
        options: ModelOptions,
        target: DecoderModel,
        own_embedding: bool = False,
        draft_vocab: int | None = None,
        fc_inputs: int = 0,
        fc_bias: bool = False,
        make_mlp: Callable[[BuildContext, int], FeedForward] = MLP,
    ) -> None:
        """`draft_vocab`: of its own LM head; None: it has none. `fc_inputs`: of the layer that widths come together in;
        0: there is none. `make_mlp`: of a layer, by its number."""
        super().__init__()
        self.config = c = config
        dtype, device = options.dtype, options.device
        if not own_embedding and c.hidden_size != target.hidden_size:
            raise ValueError(
                f"the head's hidden_size is {c.hidden_size} and the target's {target.hidden_size}: it cannot share the "
                "target's embedding, and its checkpoint has no embed_tokens of its own"
            )
        self.embed_tokens = (
            VocabEmbedding(c.vocab_size, c.hidden_size, dtype, device, tp=options.tp) if own_embedding else None
        )
        # Whole on every rank: it is small, and its outputs would have to be gathered.
        self.fc = ColumnParallelLinear(fc_inputs, c.hidden_size, fc_bias, dtype, device) if fc_inputs else None
        build = BuildContext(c, options)
        self.layers = nn.ModuleList(DecoderLayer(build, i, make_mlp(build, i)) for i in range(c.num_layers))
        self.lm_head = LMHead(draft_vocab, c.hidden_size, dtype, device, tp=options.tp) if draft_vocab else None
        assert c.ropes[0] is not None
        self.rotary = RotaryEmbedding(c.ropes[0], dtype, device)
        # Outside of nn.Module's registry: they are the target's.
        self._shared: tuple[DecoderModel] = (target,)
        self._halves: tuple[Multiply, Multiply] | None = None
        self.to_target: torch.Tensor | None = None  # [draft vocab]: ids of the target's vocabulary

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = self.embed_tokens
        return self._shared[0].embed_tokens(token_ids) if own is None else own(token_ids)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [n, width] as `forward` takes them, [n, hidden]."""
        return hidden

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] each: the LM head's input, and the hidden states that the next pass continues."""
        raise NotImplementedError

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, draft vocab]; `to_target` has the target's ids of these."""
        own = self.lm_head
        return self._shared[0].compute_logits(hidden_rows) if own is None else own(hidden_rows)

    def pair_linear(self) -> ParallelLinear:
        """The one whose inputs are embedding and hidden state side by side."""
        assert self.fc is not None
        return self.fc

    def apply_pair(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        linear = self.pair_linear()
        if self._halves is None:
            return linear(torch.cat((embeds, hidden), dim=-1))
        left, right = self._halves
        return add(left(embeds, linear.bias), right(hidden, None))

    def _split_pair(self) -> bool:
        """On a CPU it is multiplied in halves: recorded passes cannot contain torch's operations. Whether it is."""
        linear = self.pair_linear()
        weight = getattr(linear, "weight", None)
        if weight is None or not isinstance(linear.method, UnquantizedLinearMethod):
            return False
        left, right = (pack_weight(half.contiguous()) for half in weight.data.chunk(2, dim=1))
        if not isinstance(left, Panels) or not isinstance(right, Panels):
            return False
        self._halves = (left, right)
        del linear.weight
        return True

    def cache_layers(self) -> list[CacheLayer]:
        return [module for module in self.modules() if isinstance(module, CacheLayer)]

    def process_after_loading(self) -> None:
        done = {self, self.pair_linear()} if self._split_pair() else {self}
        for module in reversed(list(self.modules())):
            if module not in done and isinstance(module, HasProcessAfterLoading):
                module.process_after_loading()

    def _run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, first: int, angles: Angles, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers[first:]:
            x, residual = layer(x, residual, angles, ctx)
        assert residual is not None
        return x, residual
