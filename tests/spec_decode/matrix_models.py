"""What the matrix of combinations runs: tiny targets of one vocabulary and hidden size, and a draft model or head of
each built-in method."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.spec_decode.eagle import Eagle3Proposer, EagleProposer
from quire.spec_decode.proposer import DraftStep
from tests.spec_decode import heads
from tests.spec_decode.mtp_model import add_mtp
from tests.spec_decode.proposers import HalfRight
from tests.structured_output.model import save_model

MAX_DRAFTS = 5
OVERRIDES = {"LlamaWithMTP": "tests.spec_decode.mtp_model:LlamaWithMTP"}
# By name: speculative_config. `model` is "draft", "target" or a head.
METHODS: dict[str, dict[str, Any]] = {
    "Fixed": {"method": "tests.spec_decode.proposers:Fixed"},
    "Random": {"method": "tests.spec_decode.proposers:Random"},
    "HalfRight": {"method": "tests.spec_decode.proposers:HalfRight"},
    "Right": {"method": "tests.spec_decode.proposers:Right"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.0},
    "draft_model": {"method": "draft_model", "model": "draft"},
    "itself": {"method": "draft_model", "model": "target"},  # nearly always right
    "medusa": {"method": "medusa", "model": "medusa"},
    "eagle": {"method": "eagle", "model": "eagle"},
    "eagle3": {"method": "eagle3", "model": "eagle3"},
    "HelpedEagle": {"method": "tests.spec_decode.matrix_models:HelpedEagle", "model": "eagle"},
    "HelpedEagle3": {"method": "tests.spec_decode.matrix_models:HelpedEagle3", "model": "eagle3-speculators"},
    "mtp": {"method": "mtp"},
}
HEADS: dict[str, Callable[[Path, int], str]] = {
    "medusa": lambda folder, vocab: heads.save_medusa(folder, 64, vocab, num_heads=MAX_DRAFTS),
    "eagle": lambda folder, vocab: heads.save_eagle1(folder, vocab=vocab),
    "eagle3": lambda folder, vocab: heads.save_eagle3(folder, vocab=vocab),
    "eagle3-speculators": lambda folder, vocab: heads.save_eagle3(folder, speculators=True, vocab=vocab),
}


class HelpedEagle(HalfRight, EagleProposer):
    """Computes its drafts, which a random head seldom has right, and writes others over them."""

    def propose(self, step: DraftStep) -> None:
        EagleProposer.propose(self, step)
        HalfRight.propose(self, step)


class HelpedEagle3(HelpedEagle, Eagle3Proposer):
    pass


class Models:
    """Paths, each saved when it is first asked for."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self.new_folder = new_folder
        self.saved: dict[str, str] = {}

    def target(self, family: str, method: str | None = None) -> str:
        """Methods have the same weights, but for those of theirs that are a part of them."""
        if method != "mtp":
            return self._once(family, lambda folder: save_model(folder, 0.15, family))
        return self._once(f"{family}-mtp", lambda folder: add_mtp(Path(save_model(folder, 0.15, family))))

    def options(self, family: str, method: str, num_drafts: int) -> dict[str, Any]:
        """speculative_config, and what the method needs besides."""
        given = METHODS[method] | {"num_speculative_tokens": num_drafts}
        if "model" in given:
            given["model"] = self._drafts(family, given["model"])
        return {"speculative_config": given} | ({"model_class_overrides": OVERRIDES} if method == "mtp" else {})

    def _drafts(self, family: str, name: str) -> str:
        target = self.target(family)
        if name == "target":
            return target
        if name == "draft":
            return self._once(f"{family}-draft", lambda folder: save_model(folder, 0.15, family, num_hidden_layers=2))
        vocab = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
        return self._once(name, lambda folder: HEADS[name](folder, vocab))

    def _once(self, name: str, save: Callable[[Path], str]) -> str:
        if name not in self.saved:
            self.saved[name] = save(self.new_folder(name))
        return self.saved[name]
