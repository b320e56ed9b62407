import json

import pytest

from quire.entrypoints.cli.main import main


def test_the_benchmark_compares_equal_lengths(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--num-prompts", "3", "--input-len", "8", "--output-len", "12", "--token-id-limit", "250"]
    engine = ["--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "90", "--cpu-threads", "1"]
    assert main(["bench", "structured", tiny, "--repetitions", "2", "--json", "--no-probe", *shape, *engine]) == 0
    output = capsys.readouterr().out
    metrics = json.loads(output[output.index("{") :])["metrics"]
    free, schema, ratios = (metrics[name]["values"] for name in ("free", "under_a_schema", "ratio"))
    assert len(ratios) == 2
    assert ratios == pytest.approx([one / other for one, other in zip(schema, free, strict=True)], rel=0.01)
