"""Drafts by the prediction layers of the target's own checkpoint."""

from quire.checkpoint.resolve import resolve_model
from quire.models.decoder import DecoderModel
from quire.models.draft_head import DraftHead
from quire.models.mtp import SupportsMTP
from quire.models.options import ModelOptions
from quire.spec_decode.head_checkpoint import check_keys, head_tensors, load_head
from quire.spec_decode.head_proposer import HeadProposer


class MTPProposer(HeadProposer):
    """A target of a family that SupportsMTP; its one layer is used again for every further draft."""

    def load(self, model: DecoderModel, options: ModelOptions) -> DraftHead:
        if not isinstance(model, SupportsMTP):
            raise ValueError(
                f"speculative_config: method 'mtp' needs a model whose checkpoint has layers for it, which "
                f"{type(model).__name__} has not; other methods: 'eagle', 'eagle3', 'medusa', 'draft_model', 'ngram'"
            )
        check_keys(self.config)
        names = model.mtp_weights()
        config = self.config
        checkpoint = resolve_model(
            config.model.model,
            load_format=config.load.load_format,
            revision=config.model.revision,
            download_dir=config.load.download_dir,
            ignore_patterns=config.load.ignore_patterns,
        )
        head = model.make_mtp_head(options)
        tensors = [t for t in head_tensors(checkpoint) if names.target(t.name) or names.is_ignored(t.name)]
        load_head(head, checkpoint, tensors, names)
        head.process_after_loading()
        return head
