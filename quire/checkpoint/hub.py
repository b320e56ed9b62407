"""Downloads from the Hugging Face hub, with errors that say what to do."""

import re
from pathlib import Path

TOKENIZER_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.model", "vocab.txt", "merges.txt", "*.tiktoken")
HEAD_PATTERNS = ("*_Dense/pytorch_model.bin", "colbert_linear.pt", "sparse_linear.pt")  # of embedding models
MODEL_PATTERNS = ("*.safetensors", *HEAD_PATTERNS, *TOKENIZER_PATTERNS)
PT_PATTERNS = ("pytorch_model*.bin", *TOKENIZER_PATTERNS)


def download(
    repo: str,
    patterns: tuple[str, ...],
    revision: str | None,
    download_dir: str | None,
    ignore_patterns: tuple[str, ...] = (),
) -> Path:
    """The local snapshot folder of a hub repository, restricted to files that match `patterns`."""
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignore_patterns),
        )
    except hub_errors.GatedRepoError as error:
        raise ValueError(
            f"{repo} is gated: accept its terms on its hub page, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except hub_errors.RevisionNotFoundError as error:
        raise ValueError(f"{repo} has no revision {revision!r}; give a branch, tag or commit that exists") from error
    except hub_errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"There is no model {repo!r} on the hub (or it is private: set HF_TOKEN). "
            "A local folder or .gguf file works too."
        ) from error
    except (hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"{repo!r} is neither a local path nor in the cache, and the hub could not be reached "
            f"({type(error).__name__}). Check the network, or give a local folder or .gguf file."
        ) from error
    return Path(folder)


def commit_of(folder: Path, revision: str | None) -> str | None:
    """The commit of `revision` at the time of the download: a branch may move later."""
    if re.fullmatch("[0-9a-f]{40}", folder.name) and folder.parent.name == "snapshots":
        return folder.name
    return revision


def download_gguf(repo: str, wanted: str, revision: str | None, download_dir: str | None) -> tuple[Path, Path]:
    """The snapshot folder and one .gguf of a repository, by file name or by a part of it such as "Q4_K_M"."""
    pattern = wanted if wanted.endswith(".gguf") else f"*{wanted}*.gguf"
    folder = download(repo, (pattern,), revision, download_dir)
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        listed = ", ".join(f.name for f in found) or "none"
        raise ValueError(f"{repo}:{wanted} must match exactly one .gguf file of {repo}; it matches: {listed}")
    return folder, found[0]
