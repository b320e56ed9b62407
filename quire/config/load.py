"""Options of loading weights."""

from dataclasses import dataclass

from quire.config.fields import option, validate

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


@dataclass
class LoadConfig:
    """Where weights come from."""

    load_format: str = option("auto", "checkpoint format; dummy: random weights", choices=LOAD_FORMATS)
    download_dir: str | None = option(None, "where hub downloads are kept")
    packed_weights_cache: str | None = option(
        None,
        "on a CPU in bf16: folder for packed weights, for faster starts; needs as much disk space as the weights",
    )
    use_tqdm_on_load: bool = option(True, "show progress while loading weights")

    def __post_init__(self) -> None:
        validate(self)
