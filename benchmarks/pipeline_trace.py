"""Draw docs/pipeline.svg, when each of two stages was busy: python -m benchmarks.pipeline_trace

SmolLM2 in two stages of a thread each, eight requests; the picture shows a stretch of steps in which all decode.
"""

import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

PICTURE = Path(__file__).parents[1] / "docs" / "pipeline.svg"
REQUESTS, TOKENS = 8, 48
STEPS = 12  # shown
WIDTH, HEIGHT, LEFT, TOP = 760, 40, 70, 14
COLORS = ("#0969da", "#bc4c00")


def begin_trace(worker: Any) -> None:
    """From the arrival of a plan's stream until the stage is done with it."""
    runner, began = worker.runner, [0.0]
    worker.trace = []
    receive, sample = runner.stages.receive, runner.sample_tokens

    def received() -> None:
        receive()
        began[0] = time.monotonic()

    def sampled(*args: Any) -> Any:
        step = runner._pending.plan.step
        pending = sample(*args)
        worker.trace.append((began[0], time.monotonic(), step))
        return pending

    runner.stages.receive, runner.sample_tokens = received, sampled


def end_trace(worker: Any) -> list[tuple[float, float, int]]:
    found: list[tuple[float, float, int]] = worker.trace
    return found


def draw(stages: list[list[tuple[float, float, int]]]) -> str:
    """An SVG of the given steps by stage, one color for each micro-batch."""
    start = min(step[0] for stage in stages for step in stage)
    scale = (WIDTH - LEFT - 10) / (max(step[1] for stage in stages for step in stage) - start)
    parts = []
    for number, stage in enumerate(stages):
        y = TOP + number * (HEIGHT + 12)
        parts.append(f'<text x="0" y="{y + HEIGHT / 2 + 4}">stage {number}</text>')
        for began, ended, step in stage:
            x, width = LEFT + (began - start) * scale, max(1.0, (ended - began) * scale)
            color = COLORS[step % len(COLORS)]
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{color}" rx="2"/>')
    bottom = TOP + len(stages) * (HEIGHT + 12)
    span = 1e3 * (WIDTH - LEFT - 10) / scale
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}">{span:.0f} ms; colors: plans by turns</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 24}" font-family="sans-serif"'
    return f'{head} font-size="13" fill="#57606a">\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    with LLM(pipeline_parallel_size=2, use_tqdm_on_load=False) as llm:
        prompts = [{"prompt_token_ids": [40 + i, 41, 42]} for i in range(REQUESTS)]
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        llm.collective_rpc(begin_trace)
        llm.generate(prompts, params, use_tqdm=False)
        traces = llm.collective_rpc(end_trace)
    middle = len(traces[0]) // 2
    steps = {step for _, _, step in traces[0][middle : middle + STEPS]}
    shown = [[each for each in trace if each[2] in steps] for trace in traces]
    PICTURE.write_text(draw(shown), "utf-8")
    whole = max(end for stage in shown for _, end, _ in stage) - min(begin for stage in shown for begin, _, _ in stage)
    for number, stage in enumerate(shown):
        print(f"stage {number}: busy {sum(end - begin for begin, end, _ in stage) / whole:.0%} of {1e3 * whole:.1f} ms")


if __name__ == "__main__":
    from benchmarks import pipeline_trace

    pipeline_trace.main()  # workers import the functions by this name
