"""Run the steps of a client's script, and say of each whether it worked; needs no package."""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

Step = Callable[..., Any]


def run_steps(steps: tuple[Step, ...], *arguments: Any) -> None:
    """Exit with the number of steps that failed; a step's docstring says what it exercises."""
    failed = 0
    with asyncio.Runner() as loop:  # one for all, since connections of a client belong to a loop
        for step in steps:
            about = (step.__doc__ or step.__name__).strip().rstrip(".")
            try:
                result = step(*arguments)
                if inspect.iscoroutine(result):
                    loop.run(result)
                print(f"ok: {about}", flush=True)
            except Exception as error:
                failed += 1
                traceback.print_exc()
                cause = next(iter(str(error).splitlines()), "")
                print(f"failed: {about}: {type(error).__name__}: {cause}", flush=True)
    sys.exit(failed)
