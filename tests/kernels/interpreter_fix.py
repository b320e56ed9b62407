"""Imported by tests that run in Triton's interpreter."""

from triton.runtime import interpreter


class AnyInt(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class Int(int, metaclass=AnyInt):
    """Triton 3.6's interpreter calls int() on arrays of one element, which numpy 2.4 no longer allows."""

    def __new__(cls, value):
        return int(value.item() if hasattr(value, "item") else value)


vars(interpreter)["int"] = Int
