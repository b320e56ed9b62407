"""Put the committed results into docs/performance.md: python -m benchmarks.performance_tables"""

from pathlib import Path

from benchmarks.ratios import (
    CPU_PEERS,
    CPU_ROWS,
    H200_MODELS,
    H200_ROWS,
    H200_SERVER_ROWS,
    Pair,
    cpu_pairs,
    h200_pairs,
    h200_server_pairs,
)

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def number(value: float) -> str:
    """Three significant digits, all digits from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def cell(pair: Pair | None) -> str:
    return f"{number(pair.best)} : {number(pair.other)} = **{pair.ratio:.2f}**" if pair else ""


def spread(pair: Pair) -> str:
    return f"{number(pair.low)} to {number(pair.high)}" if pair.low < pair.high else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def h200() -> str:
    by_model = {model: h200_pairs(model) for model in H200_MODELS}
    rows = [[label, *(cell(pairs.get(row)) for pairs in by_model.values())] for row, label in H200_ROWS.items()]
    return table(["Quire : vLLM = ratio", *H200_MODELS.values()], rows)


def h200_server() -> str:
    pairs = h200_server_pairs()
    rows = [[label, cell(pairs[row]), spread(pairs[row])] for row, label in H200_SERVER_ROWS.items()]
    return table(["Qwen3-0.6B over HTTP", "Quire : vLLM = ratio", "Quire's runs"], rows)


def cpu() -> str:
    by_peer = {peer: cpu_pairs(peer) for peer in CPU_PEERS}
    rows = [[label, *(cell(pairs.get(row)) for pairs in by_peer.values())] for row, label in CPU_ROWS.items()]
    return table(["Quire : peer = ratio", *CPU_PEERS.values()], rows)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("h200", h200()), ("h200 server", h200_server()), ("cpu", cpu())):
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = before + begin + text + end + after
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
