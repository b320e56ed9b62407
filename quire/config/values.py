"""Validates numbers from files and requests: type and range, or a ValueError that names the field."""

import math
import sys
from typing import Any

from quire.config.shown import shown

INT32_MAX = 2**31 - 1


def whole_number(name: str, value: Any, minimum: int = 1, maximum: int = INT32_MAX) -> int:
    """true and 4096.0 are not accepted."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number from {minimum} to {maximum}")
    return value


def finite_number(name: str, value: Any, above: float = -math.inf, maximum: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {shown(value)}; it must be a number")
    if not above < value <= min(maximum, sys.float_info.max):
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at most {maximum:g}"] * (maximum < math.inf)
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number{' ' * bool(bounds)}{', '.join(bounds)}")
    return float(value)
