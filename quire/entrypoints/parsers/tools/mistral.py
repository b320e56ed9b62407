"""Mistral's formats."""

import re
import secrets
import string

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_calls import MarkedJsonParser
from quire.entrypoints.parsers.tools.reader import Malformed, Reading

NAME = re.compile(r"[\w.:/-]*")


class MistralParser(MarkedJsonParser):
    """[TOOL_CALLS] [{"name": "f", "arguments": {...}}], or since Mistral Small 3.1 [TOOL_CALLS]f{...}, also with
    [CALL_ID] and [ARGS] before the arguments."""

    opens = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def new_id(self) -> str:
        """Mistral's chat templates only accept ids of nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def marked(self) -> Reading[None]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from self.call_list()
            return
        name = yield from reader.match(NAME, MAX_NAME)
        if not name:
            raise Malformed
        id = None
        if (yield from reader.has("[CALL_ID]")):
            id = yield from reader.match(NAME, MAX_NAME)
        yield from reader.has("[ARGS]")
        yield from reader.space()
        yield from self.call_arguments(name, id or None)
