"""Tokens to text while they are generated."""

from codecs import utf_8_decode
from collections.abc import Sequence

from quire.tokenizer.tokenizer import Tokenizer, TokenPieces

# Tokens of context for decoders that need it: enough that a new token is not decoded as the start of a text.
CONTEXT_TOKENS = 6
# The longest UTF-8 character is four bytes, hence at most four tokens; a U+FFFD beyond that is in the text itself.
MAX_HELD_TOKENS = 4


class IncrementalDetokenizer:
    """The text of one generation, growing by whole characters.

    The results of `add` and `flush`, concatenated, equal a decode of all generated tokens after the prompt. A
    character still incomplete at `flush` is dropped; invalid UTF-8 becomes U+FFFD at once.
    `spaces_between_special_tokens` has no effect, as in transformers' fast tokenizers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ):
        """`visible` special tokens stay in the text even where others are skipped."""
        self._parts: list[str] = []
        pieces = tokenizer.pieces(skip_special_tokens, visible)
        self._stream: _ByteStream | _WindowStream
        if pieces is not None:
            self._stream = _ByteStream(pieces, prompt_token_ids, tokenizer.drops_first_space)
        else:
            self._stream = _WindowStream(tokenizer, prompt_token_ids, skip_special_tokens, visible)

    def add(self, new_token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, possibly empty."""
        text = self._stream.add(new_token_ids)
        if text:
            self._parts.append(text)
        return text

    def flush(self) -> str:
        """Text that was held back for a character that may be incomplete; call once, after the last token."""
        text = self._stream.flush()
        if text:
            self._parts.append(text)
        return text

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class _ByteStream:
    """For decoders that concatenate tokens: concatenates their bytes and emits complete characters."""

    def __init__(self, pieces: TokenPieces, prompt: Sequence[int], drops_first_space: bool):
        self._pieces = pieces
        # The prompt may end within a character, which generation completes. The tail may begin within one: only its
        # end matters.
        tail = b"".join([pieces[token] for token in prompt[-2 * MAX_HELD_TOKENS :]])
        self._held = tail[utf_8_decode(tail, "replace", False)[1] :]
        self._drop_space = drops_first_space and not any(pieces[token] for token in prompt)

    def add(self, tokens: Sequence[int]) -> str:
        pieces = self._pieces
        data = self._held + b"".join([pieces[token] for token in tokens])
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        self._held = b""
        return ""


class _WindowStream:
    """For any decoder whose text only grows: new text is the difference between decodes with and without new tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool, visible: frozenset[int]):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._skipped = tokenizer.special_ids - visible if visible and skip_special_tokens else frozenset()
        self._context = list(prompt[-CONTEXT_TOKENS:])
        self._before = self._decode(self._context)
        self._held: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        # One at a time: a decode of many tokens would hold back all of them if the last one's character is incomplete.
        return "".join([self._add_one(token) for token in tokens])

    def _add_one(self, token: int) -> str:
        self._held.append(token)
        after = self._decode(self._context + self._held)
        if after.endswith("\ufffd") and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._release(after)

    def flush(self) -> str:
        return self._release(self._decode(self._context + self._held)).rstrip("\ufffd") if self._held else ""

    def _release(self, after: str) -> str:
        new = after[len(self._before) :]
        self._context = (self._context + self._held)[-CONTEXT_TOKENS:]
        self._before = self._decode(self._context)
        self._held = []
        return new

    def _decode(self, tokens: list[int]) -> str:
        if self._skipped:
            shown = [token for token in tokens if token not in self._skipped]
            return self._tokenizer.decode(shown, skip_special_tokens=False)
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)
