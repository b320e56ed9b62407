"""`quire bench core`: the host's time for a steady decode step, without the model.

Measured separately: the core (`schedule` and `update_from_output`, with a fake runner that samples random token ids)
and the front end (`OutputProcessor.process`, detokenization included).
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.bench.common import positive
from quire.bench.machine import describe_machine
from quire.bench.report import Metric, Report
from quire.bench.workloads import CPU_TOKEN_ID_LIMIT, FIRST_TOKEN_ID
from quire.config import EngineConfig
from quire.config.flags import FlagParser
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.scheduler import Scheduler
from quire.engine.output_processor import OutputProcessor
from quire.engine.resolve_config import resolve_config
from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.messages.plan import ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.messages.speculation import DraftProfile
from quire.tokenizer.load import load_tokenizer
from quire.tokenizer.tokenizer import Tokenizer

BLOCK_SIZE = 16
PROMPT_LENS = (64, 128)
MAX_MODEL_LEN = 4096
WARM_UP_STEPS = 32  # the prompts, and two rounds of every request crossing a block boundary
COLD_MIB = 64


def parser() -> FlagParser:
    description = "Measure the host's time for a steady decode step, without the model: core and front end."
    parser = FlagParser(prog="quire bench core", description=description)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="whose tokenizer the front end uses")
    parser.add_argument(
        "--requests",
        type=counts,
        default=[64, 256],
        metavar="N,N",
        help="running requests (default: 64,256)",
    )
    parser.add_argument("--depth", type=counts, default=[1, 2], metavar="N,N", help="plans ahead (default: 1,2)")
    parser.add_argument("--steps", type=positive, default=600, metavar="N", help="steps to measure (default: 600)")
    parser.add_argument(
        "--drafts", type=int, default=0, metavar="N", help="drafts that each request verifies in a step (default: 0)"
    )
    parser.add_argument(
        "--cold", action="store_true", help=f"read {COLD_MIB} MiB between steps, as a model would, to empty the caches"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="measure the machine's read bandwidth and GEMM rate too; nothing here depends on them",
    )
    return parser


def counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    if args.drafts < 0:
        raise ValueError(f"--drafts is {args.drafts}; it must be at least 0")
    longest = PROMPT_LENS[1] + (WARM_UP_STEPS + args.steps + max(args.depth) + 1) * (1 + args.drafts)
    if longest > MAX_MODEL_LEN:
        limit = (MAX_MODEL_LEN - PROMPT_LENS[1]) // (1 + args.drafts) - WARM_UP_STEPS - max(args.depth) - 1
        raise ValueError(f"--steps is {args.steps}; at most {limit}, so that no request reaches {MAX_MODEL_LEN} tokens")
    tokenizer = embedded_or_named(args.model)
    cold = np.ones(COLD_MIB << 17) if args.cold else None

    metrics: list[Metric] = []
    for count in args.requests:
        for depth in args.depth:
            metrics += core_metrics(count, depth, args.steps, cold, args.drafts)
    for count in args.requests:
        metrics += front_end_metrics(tokenizer, count, args.steps, cold)
    workload = {
        "steps": args.steps,
        "prompt_len": f"{PROMPT_LENS[0]} to {PROMPT_LENS[1]}",
        "block_size": BLOCK_SIZE,
        "drafts": args.drafts,
        "caches": "cold" if args.cold else "warm",
    }
    given = {"model": args.model} if args.model else {}
    report = Report("core", workload, given, describe_machine(args.probe), metrics)
    print(report.as_json() if args.json else report.as_text())
    return 0


def embedded_or_named(model: str | None) -> Tokenizer:
    """The tokenizer of the named model, or of the embedded one."""
    _, checkpoint = resolve_config(EngineConfig.from_kwargs(model=model))
    return load_tokenizer(checkpoint)


@dataclass(frozen=True)
class StepTimes(Metric):
    """Microseconds, a value per step; the report holds summary statistics only."""

    by_blocks: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def p99(self) -> float:
        return float(np.percentile(self.values, 99))

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def growth(self) -> float:
        """The last quarter's median over the first one's: above 1 if a step costs more the longer requests are."""
        quarter = max(1, len(self.values) // 4)
        return float(np.median(self.values[-quarter:]) / np.median(self.values[:quarter]))

    def as_json(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("median", "mean", "p99", "growth")}
        parts = {"unit": self.unit, **numbers, "low": min(self.values), "steps": len(self.values)}
        return parts | ({"by_blocks": self.by_blocks} if self.by_blocks else {})

    def as_text(self) -> str:
        line = f"  {self.name:<36}{self.median:>8.0f} {self.unit}"
        if len(self.values) > 1:
            line += f" median (mean {self.mean:.0f}, p99 {self.p99:.0f}, low {min(self.values):.0f}"
            line += f", growth {self.growth:.2f})"
        if self.by_blocks:
            shown = (f"{name}: {facts['median']:.0f} us × {facts['steps']}" for name, facts in self.by_blocks.items())
            line += f"\n    by blocks allocated or registered: {', '.join(shown)}"
        return line


def _times(
    name: str, seconds: Sequence[float] | np.ndarray, by_blocks: dict[str, dict[str, float]] | None = None
) -> StepTimes:
    values = [float(s) * 1e6 for s in seconds]
    return StepTimes(name, "us", values, lower_is_better=True, by_blocks=by_blocks or {})


# The core


def core_metrics(
    num_requests: int, depth: int, steps: int, cold: np.ndarray | None, num_drafts: int = 0
) -> list[Metric]:
    measured = np.array(list(core_steps(num_requests, depth, steps, cold, num_drafts)))
    schedule, update, blocks = measured.T
    total = schedule + update
    name = f"core {num_requests} depth {depth}"
    return [
        _times(f"{name} schedule", schedule),
        _times(f"{name} update", update),
        _times(f"{name} total", total, by_blocks(blocks, total, width=max(1, num_requests // 32))),
    ]


def core_steps(
    num_requests: int, depth: int, steps: int, cold: np.ndarray | None = None, num_drafts: int = 0
) -> Iterator[tuple[float, float, int]]:
    """Per step: seconds of schedule and of update_from_output, and the number of blocks allocated or registered."""
    rng = np.random.default_rng(0)
    scheduler = _busy_scheduler(num_requests, rng, num_drafts)
    pool = scheduler.kv.pool
    in_flight: deque[SchedulerOutput] = deque()
    for step in range(-WARM_UP_STEPS, steps):
        _evict(cold)
        cached = pool.num_cached
        begin = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter() - begin
        assert plan is not None and len(plan.rows) == num_requests, "not a steady step: some requests do not run"
        in_flight.append(plan)
        if len(in_flight) <= depth:
            continue
        oldest = in_flight.popleft()
        output = _fake_output(oldest, rng)
        _evict(cold)
        begin = time.perf_counter()
        scheduler.update_from_output(oldest, output)
        updated = time.perf_counter() - begin
        if step >= 0:
            yield scheduled, updated, len(plan.appended.rows) + pool.num_cached - cached


def by_blocks(blocks: np.ndarray, seconds: np.ndarray, width: int) -> dict[str, dict[str, float]]:
    """Steps in buckets of `width` blocks, since the cost depends on the blocks handled one by one."""
    buckets = {}
    for low in np.unique(blocks.astype(int) // width * width).tolist():
        chosen = seconds[(blocks >= low) & (blocks < low + width)]
        name = f"{low}-{low + width - 1}" if width > 1 else f"{low}"
        buckets[name] = {"steps": len(chosen), "median": float(np.median(chosen)) * 1e6}
    return buckets


def _busy_scheduler(num_requests: int, rng: np.random.Generator, num_drafts: int) -> Scheduler:
    """A scheduler that runs all requests at once without preemption."""
    group = KVCacheGroup((0,), FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="bfloat16"))
    blocks = num_requests * (MAX_MODEL_LEN // BLOCK_SIZE)
    scheduler = Scheduler(
        KVCacheManager(KVCacheConfig(blocks, (group,))),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT_LENS[1],
        max_model_len=MAX_MODEL_LEN,
        num_drafts=num_drafts,
        adaptive_drafts=True,
        draft_profile=DraftProfile(finds=True, plain=((1, 1.0), (num_requests * PROMPT_LENS[1], 1.0))),
    )
    params = SamplingParams(max_tokens=None)
    for i in range(num_requests):
        prompt = _token_ids(rng, int(rng.integers(PROMPT_LENS[0], PROMPT_LENS[1] + 1)))
        scheduler.add_request(_request(i, prompt, params))
    return scheduler


def _request(index: int, prompt: np.ndarray, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=str(index),
        index=index,
        prompt_token_ids=prompt,
        params=params,
        eos_token_ids=(2,),  # below the drawn ids: checked, never hit
        seed=index,
        arrival_time=0.0,
    )


def _fake_output(plan: SchedulerOutput, rng: np.random.Generator) -> ModelRunnerOutput:
    count = len(plan.rows)
    if plan.num_drafts is None:
        return ModelRunnerOutput(_token_ids(rng, count)[:, None], np.ones(count, np.int32))
    width = 1 + int(plan.num_drafts.max())
    accepted = rng.integers(1, plan.num_drafts + 2, dtype=np.int32)
    found = np.full(count, width + MAX_MODEL_LEN, np.int32)
    return ModelRunnerOutput(_token_ids(rng, count * width).reshape(count, width), accepted, num_found=found)


# The front end


def front_end_metrics(tokenizer: Tokenizer, num_requests: int, steps: int, cold: np.ndarray | None) -> list[Metric]:
    metrics: list[Metric] = []
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        *steady, last = front_end_steps(tokenizer, num_requests, kind, steps, cold)
        name = f"front end {num_requests} {kind.name.lower()}"
        metrics += [_times(name, steady), _times(f"{name} last step", [last])]
    return metrics


def front_end_steps(
    tokenizer: Tokenizer, num_requests: int, kind: RequestOutputKind, steps: int, cold: np.ndarray | None = None
) -> Iterator[float]:
    """Seconds of each step in which every request gets a token, then of one in which all finish."""
    rng = np.random.default_rng(0)
    limit = min(tokenizer.vocab_size, CPU_TOKEN_ID_LIMIT)
    processor = OutputProcessor(tokenizer)
    params = SamplingParams(max_tokens=None, output_kind=kind)
    for i in range(num_requests):
        prompt = _token_ids(rng, PROMPT_LENS[0], limit)
        processor.add(str(i), None, prompt.tolist(), _request(i, prompt, params))
    pieces = tokenizer.pieces(params.skip_special_tokens)
    if pieces is not None:
        for token in range(limit):
            _ = pieces[token]  # filled lazily; a steady step finds them filled
    for step in range(-WARM_UP_STEPS, steps + 1):
        reason = FinishReason.LENGTH if step == steps else FinishReason.NONE
        outputs = EngineCoreOutputs(
            index=np.arange(num_requests),
            token_ids=_token_ids(rng, num_requests, limit),
            offsets=np.arange(num_requests + 1, dtype=np.int32),
            finish=np.full(num_requests, reason, np.int8),
            num_cached=np.zeros(num_requests, np.int32),
        )
        _evict(cold)
        begin = time.perf_counter()
        processor.process(outputs)
        took = time.perf_counter() - begin
        if step >= 0:
            yield took


def _token_ids(rng: np.random.Generator, count: int, limit: int = CPU_TOKEN_ID_LIMIT) -> np.ndarray:
    return rng.integers(min(FIRST_TOKEN_ID, limit - 1), limit, count, dtype=np.int32)


def _evict(cold: np.ndarray | None) -> None:
    if cold is not None:
        cold.sum()
