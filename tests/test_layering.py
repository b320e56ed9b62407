"""Which package may import which: the architecture, kept true by a test.

Every import counts, also one inside a function or under TYPE_CHECKING: a dependency is a dependency.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "quire"

# Top to bottom. A package may import its own row and every row below it, never one above.
LAYERS: list[set[str]] = [
    {"entrypoints", "bench"},  # users meet us here
    {"engine"},  # text <-> tokens
    {"core"},  # decides: scheduler, KV-cache manager
    {"executor"},  # distributes
    {"worker", "spec_decode"},  # executes: model runner, persistent batch, proposers of drafts
    {"features", "weights", "sleep_mode"},  # what prompts hold beside token ids; new weights; memory given back
    {"models"},
    {"lora", "quantization", "layers"},
    {"attention", "pooling", "sample"},
    {"distributed"},
    {"kernels"},
    {"platforms"},
]

# Beside the stack. Only the packages named here may import them.
BESIDE: dict[str, set[str]] = {
    "tokenizer": {"entrypoints", "bench", "engine"},
    "structured_output": {"core"},
    "checkpoint": {"engine", "worker", "spec_decode", "weights", "models", "tokenizer", "pooling"},
    "plugins": {"entrypoints", "worker"},
    "compat": {"entrypoints", "engine"},
    "planning": {"entrypoints", "bench"},
    "metrics": {"entrypoints", "bench", "engine", "core", "pooling"},
}

# What the packages outside the stack may import; everyone in the stack may import `messages` and `config`.
FOUNDATION: dict[str, set[str]] = {
    "structured_output": {"tokenizer", "checkpoint", "messages", "config"},
    "tokenizer": {"checkpoint", "messages", "config"},
    "checkpoint": {"messages", "config"},
    "messages": {"config"},
    "plugins": {"config"},
    "compat": {"tokenizer", "checkpoint", "messages", "config"},
    "metrics": {"messages", "config"},
    "planning": {"checkpoint", "messages", "config"},
    "config": set(),
    "vllm_paths": set(),  # names modules of all others, and imports none
}

# Stricter than the stack says: the scheduler reasons about blocks and tokens, and must not need a device to be tested.
FORBIDDEN: dict[str, set[str]] = {
    "core": {"models", "torch"},
}

# The package's front doors re-export the public names, and __main__ is the command line's.
EXEMPT = {ROOT / "__init__.py", ROOT / "sampling_params.py", ROOT / "__main__.py"}


def allowed_for(package: str) -> set[str]:
    """The packages of Quire that `package` may import."""
    beside = {name for name, importers in BESIDE.items() if package in importers}
    if package in FOUNDATION:
        return {package} | FOUNDATION[package] | beside
    row = next(i for i, names in enumerate(LAYERS) if package in names)
    return set().union(*LAYERS[row:]) | beside | {"messages", "config"}


def imported_modules(tree: ast.AST, package_of_file: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a file; `from quire import x` gives `quire.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_of_file[: len(package_of_file) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def violations(source: str, path: Path) -> list[str]:
    """One line per import in `source` that its place in the tree does not allow."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    package = parts[1]
    allowed, forbidden = allowed_for(package), FORBIDDEN.get(package, set())
    found = []
    for line, module in imported_modules(ast.parse(source), list(parts[:-1])):
        top, _, rest = module.partition(".")
        target = rest.partition(".")[0] if top == "quire" else top
        # `from quire import LLM` names no package; the front door may be used from the top row only.
        public_name = top == "quire" and not (ROOT / target).exists() and target not in KNOWN
        if public_name and package in LAYERS[0]:
            continue
        if target in forbidden or (top == "quire" and target not in allowed):
            found.append(f"{'/'.join(parts)}.py:{line}: {package} may not import {module}")
    return found


KNOWN = set().union(*LAYERS) | set(FOUNDATION)
FILES = sorted(set(ROOT.rglob("*.py")) - EXEMPT)


def test_every_package_has_its_place() -> None:
    packages = {path.relative_to(ROOT).with_suffix("").parts[0] for path in FILES}
    assert packages <= KNOWN, f"add {sorted(packages - KNOWN)} to the table in {Path(__file__).name}"


def test_imports_go_down() -> None:
    found = [line for path in FILES for line in violations(path.read_text(encoding="utf-8"), path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("models/llama.py", "from quire.core.scheduler import Scheduler"),
        ("kernels/rope.py", "def f():\n    import quire.layers.rotary"),
        ("core/scheduler.py", "import torch.nn"),
        ("core/scheduler.py", "from torch import Tensor"),
        ("core/scheduler.py", "from quire.models import registry"),
        ("core/scheduler.py", "from quire.tokenizer.tokenizer import Tokenizer"),
        ("worker/model_runner.py", "from ..engine import outputs"),
        ("worker/model_runner.py", "from quire import LLM"),
        ("messages/plan.py", "from quire import core"),
        ("config/model.py", "from quire.messages import plan"),
    ],
)
def test_a_wrong_import_is_seen(place: str, source: str) -> None:
    assert (ROOT / place).exists() and violations(source, ROOT / place)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("entrypoints/llm.py", "from quire.engine import outputs"),
        ("entrypoints/cli/generate.py", "from quire import LLM, SamplingParams"),
        ("core/scheduler.py", "from .block_pool import BlockPool\nimport numpy"),
        ("layers/linear.py", "from quire.quantization.base import LinearMethod"),
        ("quantization/block_quantized.py", "from quire.layers.linear import ParallelLinear"),
        ("tokenizer/gguf.py", "from quire.checkpoint.gguf_file import GGUFTensor"),
        ("kernels/rope.py", "from quire.messages.plan import NewRow\nfrom quire.config import EngineConfig"),
    ],
)
def test_a_right_import_passes(place: str, source: str) -> None:
    assert (ROOT / place).exists() and not violations(source, ROOT / place)


# Beside the module that is there for it, benchmarks: they start servers and probes in environments of their own.
READS_ENVIRONMENT = {ROOT / "config" / "environment.py"}


def environment_uses(source: str) -> list[int]:
    """Lines that read or change the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = node.value.id == "os" and node.attr in names
        else:
            imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            used = isinstance(node, ast.ImportFrom) and node.module == "os" and bool(names & imported)
        if used:
            found.append(node.lineno)
    return found


def test_one_module_touches_the_environment() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: use or extend config/environment.py"
        for path in sorted(set(ROOT.rglob("*.py")) - READS_ENVIRONMENT)
        for line in environment_uses(path.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_a_use_of_the_environment_is_seen() -> None:
    source = "import os\nos.getenv('A')\nfrom os import environ\ndef f(e=os.environ): pass\nos.environ['A'] = ''"
    assert sorted(environment_uses(source)) == [2, 3, 4, 5]
    assert environment_uses("environ = {}\nenviron['A'] = os.path") == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path)
        for path in sorted(ROOT.rglob("*.py"))
        if (text := path.read_text("utf-8")).strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert not silent
