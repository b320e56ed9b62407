"""Fit the efficiencies of `quire plan` to cards of one H200, and compare with a card that was not used for it.

python -m scripts.fit_plan            # deviations of the committed efficiencies, as in docs/plan.md
python -m scripts.fit_plan --fit      # efficiencies for quire/planning/efficiency.py
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from quire.bench.workloads import MODEL_SHAPES, Workload, gpu_workload
from quire.planning.efficiency import H200_FIT, Efficiency
from quire.planning.gpus import GPUS
from quire.planning.roofline import Roofline, Step
from quire.planning.shape import read_shape
from quire.planning.simulate import workload_steps
from quire.planning.weight_format import read_format

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class Card:
    model: str  # a shape
    file: str
    quantization: str | None = None
    key: str | None = None  # the model's name in the file, if not that of the shape

    @property
    def name(self) -> str:
        return f"{self.model} {self.quantization}" if self.quantization else self.model


FITTED = (
    Card("qwen3-0.6b", "2026-11-15-h200-card-qwen3-0.6b.json"),
    Card("qwen3-30b-a3b", "2026-11-15-h200-card-qwen3-30b-a3b.json"),
)
HELD_OUT = Card("llama3-8b", "2026-11-15-h200-card-llama3-8b.json")
# The bandwidths of quantized weights are those of Llama's `b1_tpot` here; nothing else of these is fitted.
QUANTIZED = (
    Card("llama3-8b", "2026-11-15-h200-card-llama3-8b-fp8.json", "fp8", "llama3-8b-fp8"),
    Card("llama3-8b", "2026-11-16-h200-card-llama3-8b-int4.json", "int4"),
    Card("qwen3-30b-a3b", "2026-11-16-h200-card-qwen3-30b-a3b-int4.json", "int4"),
)
CARDS = (*FITTED, HELD_OUT, *QUANTIZED)
CHUNK, MAX_ROWS = 16384, 1024  # the card's max_num_batched_tokens and max_num_seqs
FIGURES = ("b1_ttft", "b1_tpot", "nano_greedy", "t512_128", "prefill", "ctx6k")  # `prefix` shares reads of its prefix
# Random weights send the tokens of a prompt to few experts: less is read than the independent choices of the model.
NOT_FITTED = {("qwen3-30b-a3b", "b1_ttft")}
BOUNDS = {  # the machine's own limits, by probes of the card
    "bandwidth": (0.5, 4.1 / 4.8),
    "cache_bandwidth": (0.5, 4.28 / 4.8),
    "flops": (0.3, 737 / 989),
    "expert_flops": (0.2, 737 / 989),
    "attention_flops": (0.2, 737 / 989),
    "layer_s": (1e-6, 40e-6),
    "expert_layer_s": (0.0, 40e-6),
    "row_s": (0.0, 20e-6),
    "request_s": (0.0, 5e-3),
}


def measured(card: Card) -> dict[str, float]:
    """The figures that the card has; `nano` stands in for its greedy variant."""
    stored = json.loads((RESULTS / card.file).read_text("utf-8"))
    figures = stored["models"][card.key or card.model]["figures"]
    found = {name: figures.get(name) or figures.get(name.removesuffix("_greedy")) for name in FIGURES}
    return {name: figure["value"] for name, figure in found.items() if figure is not None}


@cache
def drawn(model: str, workload: str) -> Workload:
    config: dict[str, Any] = MODEL_SHAPES[model]
    return gpu_workload(workload, config["vocab_size"])


@cache
def steps(model: str, workload: str) -> list[Step]:
    work = drawn(model, workload)
    prompts = [len(prompt) for prompt in work.prompts]
    return workload_steps(prompts, work.output_lens, {None}, MAX_ROWS, CHUNK)


def predicted(card: Card, share: Efficiency = H200_FIT) -> dict[str, float]:
    """Its figures: ms for b1 and ctx6k, tokens per second for the others."""
    model = card.model
    config: dict[str, Any] = MODEL_SHAPES[model]
    line = Roofline(read_shape(config), read_format(config, card.quantization, 2), GPUS["H200"], share=share)

    def seconds(workload: str) -> float:
        return sum(line.step_seconds(step) for step in steps(model, workload))

    def tokens(workload: str) -> tuple[int, int]:
        work = drawn(model, workload)
        return work.num_prompt_tokens, work.num_output_tokens

    return {
        "b1_ttft": 1e3 * line.first_token_seconds(128, CHUNK),
        "b1_tpot": 1e3 * line.token_seconds(1, 128 + 128),
        "nano_greedy": tokens("nano")[1] / seconds("nano"),
        "t512_128": sum(tokens("t512_128")) / seconds("t512_128"),
        "prefill": tokens("prefill")[0] / seconds("prefill"),
        "ctx6k": 1e3 * line.token_seconds(32, 6000 + 64),
    }


def deviations(card: Card, share: Efficiency = H200_FIT) -> dict[str, float]:
    """Predicted relative to measured, less 1."""
    found = predicted(card, share)
    return {name: found[name] / value - 1 for name, value in measured(card).items()}


def loss(share: Efficiency) -> float:
    return sum(
        math.log1p(deviation) ** 2
        for card in FITTED
        for name, deviation in deviations(card, share).items()
        if (card.model, name) not in NOT_FITTED
    )


def fit() -> Efficiency:
    """Coordinate descent with shrinking factors: few parameters, and a loss that is cheap and nearly convex."""
    best, least = H200_FIT, loss(H200_FIT)
    factor = 1.3
    while factor > 1.005:
        improved = False
        for name, (low, high) in BOUNDS.items():
            for times in (factor, 1 / factor):
                value = min(max(getattr(best, name) * times, low), high)
                tried = replace(best, **{name: value})
                if (found := loss(tried)) < least - 1e-7:
                    best, least, improved = tried, found, True
        factor = factor if improved else factor**0.5
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit, instead of using the committed efficiencies")
    share = fit() if parser.parse_args().fit else H200_FIT
    for name, value in asdict(share).items():
        print(f"{name} = {value:.3g}")
    print()
    print(table(share))


def table(share: Efficiency = H200_FIT) -> str:
    """Predicted : measured = deviation, as in docs/plan.md."""
    rows = [["", *(f"`{name}`" for name in FIGURES)], ["---", *["---:"] * len(FIGURES)]]
    for card in CARDS:
        found, was = predicted(card, share), measured(card)
        cells = [_cell(found[name], was[name]) if name in was else "" for name in FIGURES]
        rows.append([card.name, *cells])
    return "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)


def _cell(found: float, was: float) -> str:
    digits = 0 if was >= 100 else 2
    return f"{found:,.{digits}f} : {was:,.{digits}f} = {100 * (found / was - 1):+.0f} %"


if __name__ == "__main__":
    main()
