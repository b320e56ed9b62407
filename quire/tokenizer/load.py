"""Find and load the tokenizer of a checkpoint, or another one that the user names."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoint.json_file import is_readable, read_json
from quire.checkpoint.resolve import HUB_ID, Checkpoint
from quire.config import ModelConfig
from quire.tokenizer.tokenizer import SAMPLE_TEXT, Tokenizer

if TYPE_CHECKING:
    import tokenizers


def tokenizer_of(checkpoint: Checkpoint, model: ModelConfig) -> Tokenizer:
    """The tokenizer that the options name."""
    override, revision = model.tokenizer, model.tokenizer_revision
    if override is None and revision is not None and not Path(checkpoint.name).exists() and not checkpoint.is_gguf:
        override = checkpoint.name  # the same repository at another revision
    return load_tokenizer(checkpoint, override, revision, slow=model.tokenizer_mode == "slow")


def load_tokenizer(
    checkpoint: Checkpoint, override: str | None = None, revision: str | None = None, slow: bool = False
) -> Tokenizer:
    """The checkpoint's own tokenizer, or `override`: a folder, a tokenizer.json, a .gguf file or a hub id. With `slow`
    transformers' tokenizer in Python."""
    path = checkpoint.path if override is None else _find(override, revision)
    if path.suffix == ".gguf":
        from quire.checkpoint.gguf_header import read_header
        from quire.tokenizer.gguf import build_gguf_tokenizer

        return build_gguf_tokenizer(read_header(path))
    folder, file = (path.parent, path) if path.is_file() else (path, path / "tokenizer.json")
    try:
        return _load_folder(folder, file, slow)
    except (TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"{folder} has tokenizer files that are malformed: {error!r}") from error


def _find(override: str, revision: str | None) -> Path:
    path = Path(override).expanduser()
    if path.exists():
        return path
    hub_id = HUB_ID.fullmatch(override)
    if hub_id is None or hub_id["gguf"]:
        raise ValueError(
            f"No tokenizer at {override!r}: give a folder with tokenizer files, a tokenizer.json, a .gguf file, "
            "or a hub id like 'org/name'"
        )
    from quire.checkpoint import hub

    return hub.download(override, hub.TOKENIZER_PATTERNS, revision=revision, download_dir=None)


def _load_folder(folder: Path, file: Path, slow: bool) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json") or {}
    chat_template = _chat_template(folder, config)
    if slow or not is_readable(file):
        from quire.tokenizer.fallback import load_with_transformers

        return load_with_transformers(folder, chat_template, slow)
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
        backend.decode(backend.encode(SAMPLE_TEXT).ids)  # some errors occur only when encoding
    except BaseException as error:  # the library raises bare Exception, and a BaseException where it panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ValueError(f"{file} is not a valid tokenizer.json: {error}") from error

    if (read_json(folder / "sentence_bert_config.json") or {}).get("do_lower_case") is True:
        _lower_case(backend)
    named = (read_json(folder / "special_tokens_map.json") or {}) | config
    _add_listed_tokens(backend, config, named)
    bos = _id_of(backend, named.get("bos_token"))
    eos = _id_of(backend, named.get("eos_token"))
    # add_bos_token and add_eos_token of the config are ignored, as in transformers: tokenizer.json's post-processor
    # decides.
    pad = _id_of(backend, named.get("pad_token"))
    return Tokenizer(backend, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, chat_template=chat_template)


def _lower_case(backend: "tokenizers.Tokenizer") -> None:
    """sentence-transformers' switch: before all else that the tokenizer does to a text."""
    from tokenizers import normalizers

    own = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json is a string, or an object with one."""
    return token.get("content") if isinstance(token, dict) else token


def _id_of(backend: "tokenizers.Tokenizer", token: Any) -> int | None:
    content = _content(token)
    return None if content is None else backend.token_to_id(content)


def _add_listed_tokens(backend: "tokenizers.Tokenizer", config: dict[str, Any], named: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists: older exports omit them from tokenizer.json."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    missing = [AddedToken(**fields) for _, fields in listed if fields["content"] not in known]
    known |= {token.content for token in missing}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        content = _content(named.get(role))
        if content and content not in known:
            missing.append(AddedToken(content, special=True, normalized=False))
            known.add(content)
    if missing:
        backend.add_tokens(missing)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or (read_json(folder / "chat_template.json") or {}).get("chat_template")
    if isinstance(template, list):  # several named templates
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    if not isinstance(template, str | None):
        raise ValueError(f"{folder}: chat_template is a {type(template).__name__}; it must be a text")
    return template
