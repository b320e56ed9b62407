"""How byte-level BPE families split text before merging, by llama.cpp's name for it in `tokenizer.ggml.pre`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that start at a capital letter; marks count as letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CONTRACTED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*){_CONTRACTIONS}?"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"
_GPT4O = rf"{_CONTRACTED_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_TEKKEN = rf"{_CASED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"


@dataclass(frozen=True)
class PreTokenizer:
    """`pattern` None means the original GPT-2 split."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise
    digits_by_three: bool = False  # and punctuation separate from everything else


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3_LIKE = PreTokenizer(_LLAMA3, whole_words_first=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3_LIKE,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "falcon3": _LLAMA3_LIKE,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "gpt-4o": PreTokenizer(_GPT4O),
    "falcon": PreTokenizer(digits_by_three=True),
    "glm4": PreTokenizer(_LLAMA3),
    "chatglm-bpe": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, whole_words_first=True, add_bos=True),
}
# Files older than the key have these; llama.cpp, too, can only guess then.
UNNAMED = ("", "default")


def build_pre_tokenizer(rule: PreTokenizer) -> "pre_tokenizers.PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    if rule.pattern is None:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if rule.digits_by_three:
            punctuation, digits = pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits()
            threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
            return pre_tokenizers.Sequence([punctuation, byte_level, digits, threes])
        if not rule.single_digits:
            return byte_level
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    split = pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
