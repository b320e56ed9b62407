"""`python -m tests.fuzz`: runs every target for its share of the time; failing inputs are saved in the corpus."""

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.target import CORPUS, TARGETS, Target, load_target

MAX_FAILURES = 20  # per target; more add little
PROGRESS_SECONDS = 10.0


@dataclass
class Outcome:
    name: str
    cases: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="in all, spread over the targets (default: 600)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated (default: all)")
    parser.add_argument("--seed", type=int, default=None, help="of the inputs (default: by the clock)")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="check only this file of the corpus")
    args = parser.parse_args(arguments)
    if args.repeat is not None:
        return repeat(args.repeat)
    names = [name.strip() for name in args.targets.split(",") if name.strip()]
    unknown = sorted(set(names) - TARGETS.keys())
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
    seed = int(time.time()) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)

    targets, outcomes = importable(names)
    deadline = time.monotonic() + args.seconds
    for i, target in enumerate(targets):
        share = (deadline - time.monotonic()) / (len(targets) - i)
        outcomes.append(fuzz(target, max(1.0, share), random.Random(f"{seed} {target.name}")))
    print(table(outcomes))
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def importable(names: list[str]) -> tuple[list[Target], list[Outcome]]:
    targets, absent = [], []
    for name in names:
        try:
            targets.append(load_target(name))
        except (ImportError, AttributeError) as error:
            print(f"{name}: cannot be imported: {error}", flush=True)
            absent.append(Outcome(name, note="cannot be imported"))
    return targets, absent


def fuzz(target: Target, seconds: float, rng: random.Random) -> Outcome:
    outcome = Outcome(target.name)
    began = reported = time.monotonic()
    try:
        with target:
            for data in target.cases(rng):
                now = time.monotonic()
                if now - began >= seconds or len(outcome.failures) >= MAX_FAILURES:
                    break
                if now - reported >= PROGRESS_SECONDS:
                    reported = now
                    print(f"{target.name}: {outcome.cases} cases, {len(outcome.failures)} failures", flush=True)
                outcome.cases += 1
                try:
                    target.check(data)
                except Exception as error:
                    save_failure(outcome, error, getattr(error, "data", data))
    except Exception as error:  # on entering, or from the final checks
        if hasattr(error, "data"):
            save_failure(outcome, error, error.data)
        else:
            outcome.failures.append(describe(error))
            print(f"{target.name}: {describe(error)}", flush=True)
    outcome.seconds = time.monotonic() - began
    outcome.note = str(getattr(target, "note", ""))
    print(f"{target.name}: {outcome.cases} cases, {len(outcome.failures)} failures", flush=True)
    return outcome


def save_failure(outcome: Outcome, error: Exception, data: bytes) -> None:
    file = CORPUS / outcome.name / hashlib.sha256(data).hexdigest()[:8]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    outcome.failures.append(describe(error))
    print(f"{outcome.name}: {describe(error)}\n  repeat with: python -m tests.fuzz --repeat {file}", flush=True)


def describe(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error)[:2000] or "an assertion without a message"
    return "".join(traceback.format_exception(error))[-2000:]


def repeat(file: Path) -> int:
    target = load_target(file.resolve().parent.name)
    try:
        with target:
            target.check(file.read_bytes())
    except AssertionError as error:
        print(f"{file} breaks {target.name}: {error}")
        return 1
    print(f"{file} no longer breaks {target.name}")
    return 0


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'target':<12} {'cases':>9} {'failures':>9} {'seconds':>8}"]
    for one in outcomes:
        lines.append(f"{one.name:<12} {one.cases:>9} {len(one.failures):>9} {one.seconds:>8.1f}  {one.note}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
