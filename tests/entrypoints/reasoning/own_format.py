"""A format whose tags are tokens of the embedded model, which has none for reasoning."""

from quire.entrypoints.parsers.reasoning import TagFormat

FORMAT = TagFormat(("<issue_start>",), ("<issue_closed>",), implied=True)
