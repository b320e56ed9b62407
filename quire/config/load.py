"""Options of loading weights."""

from dataclasses import dataclass

from quire.config.fields import option, validate

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


@dataclass
class LoadConfig:
    """Where weights come from."""

    load_format: str = option(
        "auto", "checkpoint format; dummy: random weights", choices=LOAD_FORMATS, aliases={"hf": "auto"}
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
    use_tqdm_on_load: bool = option(True, "show progress while loading weights")

    def __post_init__(self) -> None:
        given = self.ignore_patterns
        self.ignore_patterns = (given,) if isinstance(given, str) else tuple(given or ())
        validate(self)
