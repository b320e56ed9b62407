"""A tokenizer built from the metadata of a GGUF file."""

import logging
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from quire.checkpoint.gguf_header import GGUFHeader
from quire.tokenizer.pretokenizers import PRE_TOKENIZERS, UNNAMED, PreTokenizer, build_pre_tokenizer
from quire.tokenizer.tokenizer import SAMPLE_TEXT, Tokenizer

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
Merges = list[tuple[str, str]]


def build_gguf_tokenizer(header: GGUFHeader) -> Tokenizer:
    """Byte-level BPE ("gpt2") or SentencePiece BPE ("llama"), with the file's special tokens and chat template."""
    try:
        tokenizer = _build(header)
        tokenizer.backend.encode(SAMPLE_TEXT)  # some errors occur only when encoding
        return tokenizer
    except (ValueError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and a BaseException where it panics
        raise ValueError(
            f"{header.path} has a vocabulary that makes no tokenizer ({error}); convert it again"
        ) from error


def _build(header: GGUFHeader) -> Tokenizer:
    values = header.values
    tokens: list[str] = values.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ValueError(f"{header.path} holds no vocabulary; name a tokenizer folder or hub id with --tokenizer")
    types: Sequence[int] = values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{header.path} has {len(tokens)} tokens but {len(types)} token types; convert it again")

    model = values.get("tokenizer.ggml.model")
    if model == "gpt2":
        rule = _pre_tokenizer(header)
        backend = _byte_level_backend(tokens, values.get("tokenizer.ggml.merges") or [], rule)
        adds_bos = rule.add_bos
    elif model == "llama":
        prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
        backend = _sentencepiece_backend(header, tokens, types, prefix)
        adds_bos = True
    else:
        raise ValueError(
            f"{header.path} has a tokenizer of kind {model!r}; supported: 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE). Name another tokenizer with --tokenizer."
        )
    _add_tokens(backend, tokens, types)

    bos = _token_id(header, "bos", len(tokens))
    eos = _token_id(header, "eos", len(tokens))
    _add_bos_and_eos(
        backend,
        bos if values.get("tokenizer.ggml.add_bos_token", adds_bos) else None,
        eos if values.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=_token_id(header, "padding", len(tokens)),
        chat_template=values.get("tokenizer.chat_template") or None,
    )


def _pre_tokenizer(header: GGUFHeader) -> PreTokenizer:
    name = str(header.values.get("tokenizer.ggml.pre") or "")
    if name in UNNAMED:
        logger.warning("%s does not name its pre-tokenizer; the one of GPT-2 is assumed", header.path)
        return PRE_TOKENIZERS["gpt-2"]
    if name not in PRE_TOKENIZERS:
        # A guess would tokenize almost correctly, which shows only as worse output.
        raise ValueError(
            f"{header.path} uses the pre-tokenizer {name!r}, which is not known; known: {', '.join(PRE_TOKENIZERS)}. "
            "Name the original model's tokenizer folder or hub id with --tokenizer."
        )
    return PRE_TOKENIZERS[name]


def _byte_level_backend(tokens: list[str], merges: list[str], rule: PreTokenizer) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pairs: Merges = [(left, right) for left, _, right in map(str.partition, merges, repeat(" "))]
    backend = Backend(models.BPE(vocab=_vocabulary(tokens), merges=pairs, ignore_merges=rule.whole_words_first))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(
    header: GGUFHeader, tokens: list[str], types: Sequence[int], space_prefix: bool
) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores: list[float] = header.values.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ValueError(f"{header.path} has {len(tokens)} tokens but {len(scores)} scores; convert it again")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    vocabulary = _vocabulary(tokens)
    merges = merges_from_scores(vocabulary, tokens, types, scores)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # The prefix goes before every span of text between special tokens, as in llama.cpp and Llama 2's own tokenizer.
    prepend = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def merges_from_scores(
    vocabulary: dict[str, int], tokens: list[str], types: Sequence[int], scores: Sequence[float]
) -> Merges:
    """SentencePiece merges any adjacent pair that forms a token, best score first: each split of a token is a merge.

    Of tokens with equal scores the longer left part goes first, then lower ids, as in transformers' conversion.
    """
    merges: Merges = []
    append = merges.append
    best_first = [token_id for token_id, kind in enumerate(types) if kind == NORMAL]
    best_first.sort(key=scores.__getitem__, reverse=True)
    last, begin, count = None, 0, 0  # the score of the token before, where its merges begin, how many have it
    for token_id in best_first:
        if scores[token_id] == last:
            count += 1
        else:
            if count > 1:
                _sort_equals(merges, begin, vocabulary)
            last, begin, count = scores[token_id], len(merges), 1
        token = tokens[token_id]
        for cut in range(len(token) - 1, 0, -1):
            if (left := token[:cut]) in vocabulary and (right := token[cut:]) in vocabulary:
                append((left, right))
    if count > 1:
        _sort_equals(merges, begin, vocabulary)
    return merges


def _sort_equals(merges: Merges, begin: int, vocabulary: dict[str, int]) -> None:
    merges[begin:] = sorted(merges[begin:], key=lambda pair: (-len(pair[0]), vocabulary[pair[0]], vocabulary[pair[1]]))


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Of tokens that are there twice the first counts."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _add_tokens(backend: "tokenizers.Tokenizer", tokens: list[str], types: Sequence[int]) -> None:
    """Control tokens become special; user-defined ones are matched as a whole but are not special."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _token_id(header: GGUFHeader, name: str, vocab_size: int) -> int | None:
    token_id = header.values.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"{header.path}: {name} token {token_id} is outside the vocabulary of {vocab_size}")
    return int(token_id)


def _add_bos_and_eos(backend: "tokenizers.Tokenizer", bos: int | None, eos: int | None) -> None:
    """Make `encode` begin with the token `bos` and end with `eos`, where they are not None."""
    from tokenizers import processors

    names = {token: str(backend.id_to_token(token)) for token in (bos, eos) if token is not None}
    # As lists, not as a template string: a token's name may hold spaces or colons.
    single = [*([names[bos]] if bos is not None else []), "$A", *([names[eos]] if eos is not None else [])]
    pair = [*single, *("$B" if piece == "$A" else piece for piece in single)]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(name, token) for token, name in names.items()]
    )
