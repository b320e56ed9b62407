"""EAGLE-1 and EAGLE-3: a head continues the target's hidden states, draft after draft."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor, read_part
from quire.models.decoder import DecoderModel
from quire.models.draft_head import DraftHead
from quire.models.options import ModelOptions
from quire.spec_decode.eagle_head import Eagle1Head, Eagle3Head, flattened, head_names
from quire.spec_decode.head_checkpoint import head_hf_config, head_tensors, load_head, open_head
from quire.spec_decode.head_proposer import HeadProposer


class EagleProposer(HeadProposer):
    """EAGLE-1."""

    head_class: ClassVar[type[Eagle1Head] | type[Eagle3Head]] = Eagle1Head

    def load(self, model: DecoderModel, options: ModelOptions) -> DraftHead:
        checkpoint = open_head(self.config)
        hf = flattened(head_hf_config(self.config, checkpoint))
        if hf.get("vocab_size", model.config.vocab_size) != model.config.vocab_size:
            raise ValueError(
                f"{checkpoint.name} has a vocabulary of {hf['vocab_size']} tokens, but the target one of "
                f"{model.config.vocab_size}: it is a head of another model"
            )
        tensors = [t for t in head_tensors(checkpoint) if not _repeats(t, model)]
        head = self.head_class(hf, options, model, [tensor.name for tensor in tensors])
        names = head_names()
        if isinstance(head, Eagle1Head):
            names = names.ignoring("layers.0.input_layernorm.weight", "transformer.input_layernorm.weight")
        load_head(head, checkpoint, tensors, names)
        head.to_target = _target_ids(checkpoint, tensors, head, model.config.vocab_size)
        head.process_after_loading()
        return head


class Eagle3Proposer(EagleProposer):
    """EAGLE-3."""

    head_class = Eagle3Head


def _repeats(tensor: CheckpointTensor, model: DecoderModel) -> bool:
    """Whether a head's embedding is a copy of the target's, which needs no memory of its own."""
    shared = getattr(model.embed_tokens, "weight", None)
    if tensor.name.removeprefix("model.") != "embed_tokens.weight" or shared is None:
        return False
    rows = model.embed_tokens.rows
    if model.embed_tokens.scale != 1.0 or tuple(tensor.shape) != rows.full_shape:
        return False
    read = torch.empty(shared.shape, dtype=shared.dtype)
    read_part(tensor, read, 0, rows.start)
    return torch.equal(read, shared.to("cpu"))  # of ranks each looks up rows of its own, the target's or the head's


def _target_ids(
    checkpoint: Checkpoint, tensors: Sequence[CheckpointTensor], head: DraftHead, vocab_size: int
) -> torch.Tensor | None:
    """[draft vocab] from `d2t`, which has the differences of target's and draft's ids."""
    if head.lm_head is None:
        return None
    count = head.lm_head.rows.full_shape[0]
    found = [tensor for tensor in tensors if tensor.name == "d2t"]
    if not found:
        if count != vocab_size and checkpoint.format != "dummy":
            raise ValueError(
                f"{checkpoint.name} has a draft vocabulary of {count} tokens of {vocab_size}, but no d2t, which says "
                "which ones"
            )
        return torch.arange(count, device=head.rotary.cache.device) if count != vocab_size else None
    differences = torch.empty(count, dtype=torch.int64)
    found[0].read_into(differences)
    ids = torch.arange(count) + differences
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"{checkpoint.name}: d2t names tokens that the target's vocabulary of {vocab_size} has not")
    return ids.to(head.rotary.cache.device)
