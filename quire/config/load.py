"""Options of loading weights."""

import string
from dataclasses import dataclass

from quire.config.fields import option, validate

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "sharded_state", "dummy")
SHARDED_STATE_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_LOAD_THREADS = 256


def check_state_pattern(pattern: str) -> str:
    """Of names of sharded state's files. ValueError if it names none, or files of another folder."""
    try:
        fields = sorted(field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None)
    except (ValueError, TypeError, AttributeError):
        fields = []
    if fields != ["part", "rank"] or "/" in pattern or not pattern.endswith(".safetensors"):
        raise ValueError(
            f"the pattern of sharded state's files is {pattern!r}; it must be a file name with {{rank}} and {{part}} "
            f"that ends in .safetensors, such as {SHARDED_STATE_PATTERN}"
        )
    return pattern


@dataclass
class LoadConfig:
    """Where weights come from."""

    load_format: str = option(
        "auto",
        "checkpoint format; sharded_state: of save_sharded_state, files of each rank's own; dummy: random weights",
        choices=LOAD_FORMATS,
        aliases={"hf": "auto"},
    )
    download_dir: str | None = option(None, "where hub downloads are kept")
    ignore_patterns: tuple[str, ...] = option(
        ("original/**/*",), "files of a hub model that are not downloaded", several="many"
    )
    safetensors_load_strategy: str | None = option(
        None,
        "how weight files are read: prefetch: the system reads ahead (the default); eager: all of them first; lazy: "
        "when a tensor is needed",
        choices=("lazy", "prefetch", "eager"),
    )
    packed_weights_cache: str | None = option(
        None,
        "on a CPU in bf16: folder for packed weights, for faster starts; needs as much disk space as the weights",
    )
    load_threads: int | None = option(
        None,
        "threads that read weights; by default 8 for a GPU, on a CPU as many as compute",
        minimum=1,
        maximum=MAX_LOAD_THREADS,
    )
    sharded_state_pattern: str | None = option(None, f"names of sharded state's files, such as {SHARDED_STATE_PATTERN}")
    use_tqdm_on_load: bool = option(True, "show progress while loading weights")

    def __post_init__(self) -> None:
        given = self.ignore_patterns
        self.ignore_patterns = (given,) if isinstance(given, str) else tuple(given or ())
        validate(self)
        if self.sharded_state_pattern is not None:
            check_state_pattern(self.sharded_state_pattern)
            if self.load_format != "sharded_state":
                raise ValueError(
                    f"a pattern of files is for load_format 'sharded_state'; it is {self.load_format!r} (--load-format)"
                )

    @property
    def draft_format(self) -> str:
        """Of a draft model's checkpoint: sharded state is the target's alone."""
        return "auto" if self.load_format == "sharded_state" else self.load_format
