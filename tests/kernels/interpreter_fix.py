"""Imported by tests that run in Triton's interpreter."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

create_dot = interpreter.InterpreterBuilder.create_dot


class AnyInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class Int(int, metaclass=AnyInt):
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 no longer allows."""

    def __new__(cls, value):
        return int(value.item() if hasattr(value, "item") else value)


vars(interpreter)["int"] = Int


STEP = 16  # products that one matrix instruction adds


def create_dot_in_float64(self, a, b, d, *precision):
    """numpy adds up a row's products in an order that depends on its place in the tile, on some processors, whereas a
    GPU does not: rounded from float64 the bits are equal. Sums are rounded where a GPU's instructions end."""
    if d.data.dtype != np.float32:
        return create_dot(self, a, b, d, *precision)
    total = d.data
    zero = interpreter.TensorHandle(np.zeros_like(total, np.float64), tl.float64)
    for k in range(0, a.data.shape[-1], STEP):
        left = interpreter.TensorHandle(a.data[..., k : k + STEP], a.dtype)
        right = interpreter.TensorHandle(b.data[..., k : k + STEP, :], b.dtype)
        total = total + create_dot(self, left, right, zero, *precision).data.astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = create_dot_in_float64
