"""Puts the whole JSON Schema test suite to every backend and writes the counts into the documentation:

python -m tests.structured_output.suite_table
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire import LLM
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output import suite
from tests.structured_output.model import open_engine, save_model, vocabulary_of

DOCS = Path(__file__).parents[2] / "docs" / "structured_output.md"
BEGIN, END = "<!-- suite table -->", "<!-- end of suite table -->"
BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
HEAD = """\
| schemas | backend | given | accepted | rejected | outputs | valid | cut by length | invalid | \
valid instances accepted | invalid instances accepted |
|---|---|---|---|---|---|---|---|---|---|---|"""


def count(llm: LLM, vocabulary: Vocabulary, groups: Sequence[suite.Group], backend: str, seeds: range) -> suite.Counts:
    registry = BackendRegistry(lambda: vocabulary)
    counts = suite.Counts(schemas=len(groups))
    served = []
    for group in groups:
        compiled = suite.compile_group(registry, group, backend)
        if not isinstance(compiled, str):
            served.append((group, compiled))
            suite.check_instances(compiled, group, vocabulary, counts)
    counts.accepted = len(served)
    suite.generate(llm, served, backend, seeds, vocabulary, counts)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="outputs per schema")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args(arguments)
    lines, wrong = [HEAD], []
    with tempfile.TemporaryDirectory() as folder:
        tiny = save_model(Path(folder))
        vocabulary = vocabulary_of(tiny)
        with open_engine(tiny) as llm:
            for name, groups in (("unchanged", suite.groups()), ("with a type", suite.typed_groups())):
                for backend in BACKENDS:
                    c = count(llm, vocabulary, groups, backend, range(args.seeds))
                    refused, faulty = c.schemas - c.accepted, c.outputs - c.valid - c.cut
                    accepted = f"{c.valid_accepted} of {c.valid_instances}"
                    row = (name, backend, c.schemas, c.accepted, refused, c.outputs, c.valid, c.cut, faulty)
                    lines.append(
                        f"| {' | '.join(map(str, row))} | {accepted} | {c.invalid_accepted} of {c.invalid_instances} |"
                    )
                    print(lines[-1], flush=True)
                    wrong += [f"{backend}: {each}" for each in c.wrong]
    text = args.docs.read_text()
    before, rest = text.split(BEGIN)
    args.docs.write_text(before + "\n".join([BEGIN, *lines, END]) + rest.split(END)[1])
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
