"""The tokenizer of a model: `tokenizers.Tokenizer` used directly, without transformers where the files allow."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from quire.tokenizer.token_bytes import decoder_bytes

if TYPE_CHECKING:
    import tokenizers

    from quire.tokenizer.fallback import SlowBackend


SAMPLE_TEXT = "Hello, world 12 é 😀\n\tdef f(x): ..."  # every tokenizer must encode it when it is loaded

GROUP_CHARS = 1 << 20  # of texts encoded in one call, which needs 200 bytes for each
MAX_REASON = 500  # characters of the library's message
PANIC = "PanicException"  # a Rust panic: a BaseException whose class cannot be imported

T = TypeVar("T")


def groups_to_encode(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Of one call each: that bounds its memory, and an item that is too long fails early. `size_of`: in characters."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size > GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


class TokenPieces(dict[int, bytes]):
    """Token id -> the bytes it adds to the text, filled on first use; unknown and `skipped` ids add nothing."""

    def __init__(
        self,
        backend: "tokenizers.Tokenizer | SlowBackend",
        to_bytes: Callable[[str], bytes],
        skipped: frozenset[int] = frozenset(),
    ):
        super().__init__()
        self._backend = backend
        self._to_bytes = to_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        piece = b"" if token is None else self._to_bytes(token)
        self[token_id] = piece
        return piece


class Tokenizer:
    """Text to token ids and back, and properties of the vocabulary that the engine needs."""

    def __init__(
        self,
        backend: "tokenizers.Tokenizer | SlowBackend",
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        chat_template: str | None = None,
    ):
        # Truncation and padding saved with the tokenizer are settings for training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

        decoding = decoder_bytes(backend)
        self.drops_first_space = decoding is not None and decoding[1]
        self._pieces: tuple[TokenPieces, TokenPieces] | None = None
        if decoding is not None:
            self._pieces = TokenPieces(backend, decoding[0]), TokenPieces(backend, decoding[0], self.special_ids)
            self._to_bytes = decoding[0]
        self._pieces_with: dict[frozenset[int], TokenPieces] = {}

    @functools.cached_property
    def longest_token(self) -> int:
        """In characters of the vocabulary's own spelling: no token covers more of a text."""
        return max(map(len, self.backend.get_vocab(True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # Not the library's own `encode`, which holds the GIL: a long text would block every other thread.
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode` for each text, on several threads. ValueError if the library fails on one."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise _cannot_encode(texts, error) from error
        return [list(encoding.ids) for encoding in encodings]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Of two texts each: ids with the special tokens around and between them, and which text each belongs to."""
        try:
            encodings = self.backend.encode_batch(list(pairs), add_special_tokens=True)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise _cannot_encode([text for pair in pairs for text in pair], error) from error
        return [(list(encoding.ids), list(encoding.type_ids)) for encoding in encodings]

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Also where each token begins and ends in the text; None if this tokenizer does not know."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        offsets = getattr(encoding, "offsets", None)
        return None if offsets is None else (list(encoding.ids), list(offsets))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token; "" for an id it does not have."""
        return [self.backend.id_to_token(token_id) or "" for token_id in ids]

    def pieces(self, skip_special_tokens: bool, visible: frozenset[int] = frozenset()) -> TokenPieces | None:
        """What each token adds to the text; None if this tokenizer's decoder does more than concatenate tokens.

        Special tokens that are `visible` are never skipped."""
        if self._pieces is None or not visible or not skip_special_tokens:
            return self._pieces[skip_special_tokens] if self._pieces else None
        if visible not in self._pieces_with:
            self._pieces_with[visible] = TokenPieces(self.backend, self._to_bytes, self.special_ids - visible)
        return self._pieces_with[visible]

    def special_id(self, text: str) -> int | None:
        """The id of the special token with exactly this text, if there is one."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be a whole character."""
        if self._pieces:
            return self._pieces[0][token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, its leading space kept; part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _cannot_encode(texts: Sequence[str], error: BaseException) -> ValueError:
    wrong = [text for text in texts if not _is_text(text)]
    if not wrong:
        return ValueError(f"the tokenizer cannot encode this text: {str(error)[:MAX_REASON]}")
    if isinstance(wrong[0], str):
        return ValueError("The text is not valid Unicode: it holds half of a surrogate pair; send well-formed UTF-8")
    return ValueError(f"Text to tokenize must be a string, not {type(wrong[0]).__name__}")
