"""Features of prompts on the device: what encoders made of them, written over the embeddings of a step's token ids."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.transfer import to_device
from quire.messages.features import EMBEDS, Feature, FeaturePlan, FeatureSupport, prompt_positions
from quire.messages.plan import NewRow, SchedulerOutput
from quire.models.base import LanguageModel, SupportsFeatures


@dataclass(slots=True)
class RowFeatures:
    features: tuple[Feature, ...]
    positions: np.ndarray | None  # [3, prompt]; None: those of text
    position_delta: int  # from a generated token's index to its position

    @property
    def end(self) -> int:
        """Later tokens need nothing of it."""
        return self.features[-1].stop if self.positions is None else self.positions.shape[1]


def feature_support(model: LanguageModel) -> FeatureSupport | None:
    """Of a loaded model; None: its prompts are token ids only."""
    if not isinstance(model, SupportsFeatures):
        return None
    return FeatureSupport(model.hidden_size, model.feature_kinds, model.position_axes)


class FeatureStore:
    """Rows with features, and encoder outputs by content hash. The scheduler decides what is kept."""

    def __init__(self, model: LanguageModel, num_rows: int, device: torch.device) -> None:
        self.model = model if isinstance(model, SupportsFeatures) else None
        self.device = device
        self.rows: dict[int, RowFeatures] = {}
        self.encoded: dict[bytes, torch.Tensor] = {}
        # Of a model whose positions have three axes: added to the index of a token after the prompt.
        self.position_delta: torch.Tensor | None = None
        if self.model is not None and self.model.position_axes > 1:
            self.position_delta = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._last_position = (model.max_positions or 1 << 31) - 1

    def release(self, plan: SchedulerOutput) -> None:
        """Rows that finished, and outputs that no request needs any more. First of a plan's changes: it is told once,
        whatever fails after it."""
        if self.rows:
            for row in (*plan.finished_rows, *(new.row for new in plan.new_rows)):
                self.rows.pop(row, None)
        if plan.features is not None:
            for key in plan.features.free:
                self.encoded.pop(key, None)

    def add(self, plan: SchedulerOutput) -> None:
        for new in plan.new_rows:
            if new.features:
                self.rows[new.row] = self._row(new)
        if self.position_delta is not None and plan.new_rows:
            rows = [new.row for new in plan.new_rows]
            deltas = [self.rows[row].position_delta if row in self.rows else 0 for row in rows]
            rows_, deltas_ = to_device(self.device, np.array(rows), np.array(deltas))
            self.position_delta[rows_.long()] = deltas_

    def _row(self, new: NewRow) -> RowFeatures:
        if self.position_delta is None or all(feature.positions is None for feature in new.features):
            return RowFeatures(new.features, None, 0)
        positions = prompt_positions(new.features, new.num_prompt_tokens)
        return RowFeatures(new.features, positions, int(positions.max()) + 1 - new.num_prompt_tokens)

    def shifted(self, positions: torch.Tensor, rows: torch.Tensor, token_rows: torch.Tensor | None) -> torch.Tensor:
        """Positions of a step's tokens, from their indices [N], as if all were generated. Padding and drafts past a
        row's limit stay within the table."""
        assert self.position_delta is not None
        of_token = rows.long() if token_rows is None else rows.long()[token_rows.long()]
        return (positions + self.position_delta[of_token]).clamp(0, self._last_position)

    def overlay(
        self, plan: FeaturePlan, query_start: np.ndarray, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [N, hidden] and positions ([N], or [3, N]) of a step, with the features in their places: after
        `encode`."""
        assert self.model is not None
        embeds = self.model.embed(input_ids)
        if self.position_delta is not None:
            positions = positions.repeat(3, 1)
        for chunk in plan.chunks:
            row, at = self.rows[chunk.row], int(query_start[chunk.place])
            for feature in row.features:
                first, stop = max(chunk.start, feature.start), min(chunk.stop, feature.stop)
                if first < stop:
                    part = self._part(feature, first - feature.start, stop - feature.start)
                    embeds[at + first - chunk.start : at + stop - chunk.start].copy_(part)
            if row.positions is not None:
                part = self._to_device(row.positions[:, chunk.start : chunk.stop])
                positions[:, at : at + part.shape[1]] = part  # tokens after the prompt keep what `shifted` gave them
            if chunk.stop >= row.end:
                del self.rows[chunk.row]  # its data may be large
        return embeds, positions

    def _part(self, feature: Feature, first: int, stop: int) -> torch.Tensor:
        if feature.kind != EMBEDS:
            return self.encoded[feature.content_hash][first:stop]
        assert self.model is not None
        part = self._to_device(feature.data[first:stop])
        return part if self.model.embeds_scale == 1.0 else part * self.model.embeds_scale

    def encode(self, plan: FeaturePlan) -> None:
        """Outputs for the step's features of rows, those of a kind in one call."""
        by_kind: dict[str, list[Feature]] = {}
        for row, index in plan.encode:
            feature = self.rows[row].features[index]
            by_kind.setdefault(feature.kind, []).append(feature)
        for kind, features in by_kind.items():
            assert self.model is not None
            outputs = self.model.encode(kind, [self._to_device(feature.data) for feature in features])
            for feature, output in zip(features, outputs, strict=True):
                expected = (feature.length, self.model.hidden_size)
                if tuple(output.shape) != expected:
                    raise ValueError(
                        f"the encoder for {kind} made {list(output.shape)} of a feature in place of {feature.length} "
                        f"tokens; it must make {list(expected)}"
                    )
                # A part of a larger tensor would keep all of it alive.
                is_part = output.untyped_storage().nbytes() > output.nbytes
                self.encoded[feature.content_hash] = output.clone() if is_part else output

    def _to_device(self, data: np.ndarray) -> torch.Tensor:
        """A copy, since received arrays are read-only; from pinned memory, so that nothing waits for the device."""
        copy = torch.tensor(data)
        return copy.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else copy
