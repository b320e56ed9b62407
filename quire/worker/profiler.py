"""Records what a worker does with torch's profiler, to a trace file."""

import os
import time
from pathlib import Path
from typing import Any

import torch

SWITCHES = {  # our option of the profiler -> its default
    "torch_profiler_record_shapes": False,
    "torch_profiler_with_memory": False,
    "torch_profiler_with_stack": False,
    "torch_profiler_with_flops": False,
    "torch_profiler_use_gzip": True,
}
OPTIONS = ("profiler", "torch_profiler_dir", *SWITCHES)
NEUTRAL = ("delay_iterations", "max_iterations", "ignore_frontend")  # vLLM's, accepted where they ask for nothing


class TorchProfiler:
    """`config` is the engine's profiler_config; without it nothing can be recorded."""

    def __init__(self, config: dict[str, Any] | None, rank: int) -> None:
        given = {name: value for name, value in (config or {}).items() if value or name not in NEUTRAL}
        unknown = given.keys() - set(OPTIONS)
        if unknown or given.get("profiler", "torch") != "torch":
            wrong = sorted(unknown) if unknown else f"profiler {given['profiler']!r}"
            raise ValueError(f"profiler_config has {wrong}; allowed: profiler 'torch', {', '.join(OPTIONS[1:])}")
        self._folder = given.get("torch_profiler_dir")
        self._options = SWITCHES | {name: bool(value) for name, value in given.items() if name in SWITCHES}
        self._rank = rank
        self._running: tuple[Any, Path] | None = None

    def start(self, prefix: str | None = None) -> None:
        if self._folder is None:
            raise RuntimeError(
                "there is no folder for profiles: give profiler_config={'profiler': 'torch', 'torch_profiler_dir': ...}"
            )
        if self._running is not None:
            raise RuntimeError("the profiler runs already; stop_profile ends it")
        folder = Path(self._folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        ending = ".pt.trace.json" + (".gz" if self._options["torch_profiler_use_gzip"] else "")
        name = f"{prefix or 'profile'}-rank{self._rank}-{os.getpid()}-{time.time_ns()}{ending}"
        recorder = torch.profiler.profile(
            record_shapes=self._options["torch_profiler_record_shapes"],
            profile_memory=self._options["torch_profiler_with_memory"],
            with_stack=self._options["torch_profiler_with_stack"],
            with_flops=self._options["torch_profiler_with_flops"],
        )
        recorder.start()
        self._running = recorder, folder / name

    def stop(self) -> str | None:
        """The trace's path; None if the profiler was not running."""
        if self._running is None:
            return None
        (recorder, path), self._running = self._running, None
        recorder.stop()
        recorder.export_chrome_trace(str(path))
        return str(path)
