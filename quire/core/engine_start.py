"""An engine's process, which can be started before its configuration is complete: it imports torch meanwhile."""

import contextlib
import importlib
import multiprocessing
from multiprocessing.connection import Connection

from quire.config import EngineConfig
from quire.config.environment import forwarded, receive_forwarded
from quire.platforms.process import die_with_parent, leave_signals_to_parent
from quire.platforms.start_up import collector_paused, set_torch_environment

# A fresh interpreter per process: a fork would inherit locks held by the parent's threads.
SPAWN = multiprocessing.get_context("spawn")


class EngineStart:
    """Call from a thread that outlives the engine, such as the main one: the process ends with it."""

    def __init__(self, config: EngineConfig) -> None:
        """`config` may lack all that is read from the model."""
        receiver, self._sender = SPAWN.Pipe(duplex=False)
        one_worker = config.parallel.num_ranks == 1 and config.parallel.distributed_executor_backend in (None, "uni")
        self.process = SPAWN.Process(target=_main, args=(receiver, one_worker), name="quire-engine")
        self.process.start()
        receiver.close()

    def proceed(self, config: EngineConfig, address: str, log_level: int) -> None:
        """What `engine_process_main` is called with."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which those who wait for it find out
            self._sender.send((config, address, log_level, forwarded()))
        self._sender.close()

    def cancel(self) -> None:
        """End the process, if it is still there."""
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _main(receiver: Connection, one_worker: bool) -> None:
    die_with_parent()
    leave_signals_to_parent()
    set_torch_environment()
    with collector_paused():
        from quire.core.engine_process import engine_process_main

        importlib.import_module("quire.executor.uniproc" if one_worker else "quire.platforms.defaults")
    try:
        config, address, log_level, variables = receiver.recv()
    except EOFError:
        return  # it is not needed after all
    receive_forwarded(variables)
    engine_process_main(config, address, log_level)
