"""Texts, token ids and pairs of texts as prompts to pool, within the model's length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.config import EngineConfig
from quire.config.pooling import EMBED, PoolingSetup
from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.tokenizer.tokenizer import Tokenizer, groups_to_encode

if TYPE_CHECKING:
    from quire.entrypoints.chat_renderer import ChatRenderer

SIDES = (None, "left", "right")


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt are kept: -1: as many as fit; None: all, and a longer one is refused."""

    keep: int | None = None
    side: str | None = None  # that is cut; the end unless "left"

    def check(self, longest: int) -> None:
        if self.side not in SIDES:
            raise ValueError(f"truncation_side is {shown(self.side)}; allowed: left, right")
        if self.keep is not None and not (self.keep == -1 or 1 <= self.keep <= longest):
            raise ValueError(
                f"truncate_prompt_tokens is {self.keep}; it must be -1, or from 1 to max_model_len, here {longest}. "
                "Please request a smaller truncation size."
            )

    def most(self, longest: int) -> int | None:
        return longest if self.keep == -1 else self.keep


ALL = Truncation()


class PoolingInputs:
    def __init__(self, config: EngineConfig, tokenizer: Callable[[], Tokenizer], longest: int) -> None:
        """`tokenizer`: raises where there is none. `longest`: in tokens."""
        self.setup, self.longest = config.pooling.setup, longest
        self._tokenizer, self._chat_template = tokenizer, config.model.chat_template
        self._has_types = (config.model.hf_config.get("type_vocab_size") or 0) > 1

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer()

    @cached_property
    def _frame(self) -> list[int]:
        """The tokens that the tokenizer puts around a text."""
        return self.tokenizer.encode("", add_special_tokens=True)

    @cached_property
    def _renderer(self) -> "ChatRenderer":
        from quire.entrypoints.chat_renderer import ChatRenderer  # imports jinja2

        return ChatRenderer(self.tokenizer, self._chat_template)

    def named_prompt(self, name: str | None) -> str:
        """What sentence-transformers puts before a text: by name, else the model's default."""
        prompts = self.setup.prompt_by_name if self.setup is not None else {}
        if name is None:
            name = self.setup.default_prompt if self.setup is not None else None
        if name is None or name == "":
            return ""
        if name not in prompts:
            allowed = f"the model's are: {', '.join(map(repr, prompts))}" if prompts else "the model has none"
            raise ValueError(f"prompt_name is {shown(name)}; {allowed}")
        return prompts[name]

    def texts(
        self, texts: Sequence[str], special: bool = True, cut: Truncation = ALL, prefix: str = "", around: str = ""
    ) -> list[ParsedPrompt]:
        """`around`: what a template makes of no text, whose tokens stay where a text is cut."""
        prompts = []
        if self.setup is not None and self.setup.messages and EMBED in self.setup.tasks:
            around = self._conversation(prefix, "") if cut.keep is not None else ""
            texts, prefix, special = [self._conversation(prefix, text) for text in texts], "", False
        frame = self._frame if special else self.tokenizer.encode(around, add_special_tokens=False)
        for group in groups_to_encode(texts, len):
            given = [prefix + text for text in group] if prefix else group
            for text, ids in zip(given, self.tokenizer.encode_batch(given, special), strict=True):
                prompts.append(ParsedPrompt(text, self._cut_text(ids, cut, frame)))
        return prompts

    def _conversation(self, prompt: str, text: str) -> str:
        first = [{"role": "system", "content": prompt}] if prompt else []
        return self._renderer.render([*first, {"role": "user", "content": text}], add_generation_prompt=False)

    def ids(self, prompts: Sequence[list[int]], cut: Truncation = ALL) -> list[ParsedPrompt]:
        most = cut.most(self.longest)
        if most is None:
            return [ParsedPrompt(None, ids) for ids in prompts]
        return [ParsedPrompt(None, ids[-most:] if cut.side == "left" else ids[:most]) for ids in prompts]

    def pairs(self, pairs: Sequence[tuple[str, str]], cut: Truncation = ALL) -> list[ParsedPrompt]:
        """For cross-encoders: both texts in one prompt, with separators and segments if the model has these."""
        if self.setup is None or not self.setup.pairs:
            return self.texts([query + document for query, document in pairs], cut=cut)
        prompts = []
        for group in groups_to_encode(pairs, lambda pair: len(pair[0]) + len(pair[1])):
            for ids, types in self.tokenizer.encode_pairs(group):
                found = ParsedPrompt(None, self._cut_text(ids, cut, self._frame))
                if self._has_types:
                    most = len(found.token_ids)
                    found.token_types = types[-most:] if cut.side == "left" else types[: most - 1] + types[-1:]
                prompts.append(found)
        return prompts

    def shortened(self, texts: Sequence[str], most: int) -> list[str]:
        """Each text's first `most` tokens."""
        if not most:
            return list(texts)
        return [self._shortened(text, most) for text in texts]

    def _shortened(self, text: str, most: int) -> str:
        found = self.tokenizer.encode_with_offsets(text, add_special_tokens=False)
        if found is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            return text if len(ids) <= most else self.tokenizer.decode(ids[:most])
        offsets = found[1]
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]

    def _cut_text(self, ids: list[int], cut: Truncation, frame: list[int]) -> list[int]:
        """As transformers cuts: the tokens around a text stay."""
        most = cut.most(self.longest)
        if most is None or len(ids) <= most:
            return ids
        if cut.side == "left":
            first = _common(frame, ids)
            return ids[:first] + ids[len(ids) - max(0, most - first) :] if first < most else ids[:most]
        last = _common(frame[::-1], ids[::-1])
        return ids[: most - last] + ids[len(ids) - last :] if last < most else ids[:most]


def _common(frame: Sequence[int], ids: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for expected, found in zip(frame, ids, strict=False):
        if expected != found:
            break
        count += 1
    return count


def split_long(
    prompts: list[ParsedPrompt], setup: PoolingSetup | None, task: str | None, longest: int
) -> tuple[list[ParsedPrompt], list[int] | None]:
    """Prompts that are longer than the model's length in parts, where the user asked for that; and of how many each
    consists, or None if nothing was split."""
    if setup is None or not setup.chunked or (task or setup.task) != EMBED:
        return prompts, None
    if all(len(prompt.token_ids) <= longest for prompt in prompts):
        return prompts, None
    limit = setup.max_embed_len
    parts: list[ParsedPrompt] = []
    counts: list[int] = []
    for prompt in prompts:
        ids = prompt.token_ids
        if limit is not None and len(ids) > limit:
            raise ValueError(f"the prompt has {len(ids)} tokens; at most {limit} are allowed (max_embed_len)")
        pieces = [ids[first : first + longest] for first in range(0, len(ids), longest)] or [ids]
        parts += [ParsedPrompt(None, piece, prompt.cache_salt, lora=prompt.lora) for piece in pieces]
        counts.append(len(pieces))
    return parts, counts


def joined(outputs: Sequence[Any], counts: list[int]) -> list[Any]:
    """Outputs of prompts whose parts these are: the mean of the parts' vectors, by their numbers of tokens."""
    found, first = [], 0
    for count in counts:
        parts = outputs[first : first + count]
        first += count
        whole = parts[0]
        if count > 1 and all(len(part.outputs.data) for part in parts):
            weights = np.array([len(part.prompt_token_ids) for part in parts], np.float32)
            data = np.stack([part.outputs.data for part in parts])
            whole.outputs.data = weights @ data / weights.sum()
            whole.prompt_token_ids = [token for part in parts for token in part.prompt_token_ids]
        elif count > 1:
            whole = next(part for part in parts if not len(part.outputs.data))  # one that failed
        found.append(whole)
    return found
