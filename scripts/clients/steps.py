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
    for step in steps:
        about = (step.__doc__ or step.__name__).strip().rstrip(".")
        try:
            result = step(*arguments)
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print(f"ok: {about}", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"failed: {about}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    sys.exit(failed)
