"""Lower instruction-set levels on this machine: every path generates the same text."""

import json
import os
import subprocess
import sys

import pytest

from quire.kernels import native
from quire.kernels.native.build import processor_flags
from quire.platforms import cpu_isa, current_platform
from tests.tiny_models import save_tiny

CHILD = """
import json, sys
from quire import LLM, SamplingParams

prompts = [[(7 * i + 3 * j) % 211 for j in range(length)] for i, length in enumerate((1, 9, 40))]
arguments = dict(skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, max_model_len=128, **json.loads(sys.argv[2]))
found = {}
for dtype in ("float32", "bfloat16"):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    with LLM(sys.argv[1], dtype=dtype, **arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    logprobs = [[next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]] for output in outputs]
    found[dtype] = tokens, logprobs
print(json.dumps(found))
"""

# name -> environment, engine arguments, a word of the start-up summary
SETTINGS: dict[str, tuple[dict[str, str], dict[str, object], str]] = {
    "as it is": ({}, {}, native.describe()),
    "avx512": ({"QUIRE_CPU_ISA": "avx512"}, {}, "kernels"),
    "avx2": ({"QUIRE_CPU_ISA": "avx2"}, {}, "kernels"),
    "portable": ({"QUIRE_CPU_ISA": "portable"}, {}, "portable kernels"),
    "no native kernels": ({"QUIRE_NATIVE_KERNELS": "0"}, {}, "plain torch"),
    "no compiler": ({"PATH": "", "XDG_CACHE_HOME": "{empty}"}, {}, "plain torch"),
    "one thread": ({}, {"cpu_threads": 1}, "1 threads"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return str(folder)


def run(model, folder, setting):
    environment, arguments, word = SETTINGS[setting]
    environment = {name: value.replace("{empty}", str(folder)) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, json.dumps(arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert word in done.stderr and "warning" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    return run(model, tmp_path_factory.mktemp("cache"), "as it is")


@pytest.mark.parametrize("setting", list(SETTINGS)[1:])
def test_the_same_text(model, reference, tmp_path, setting):
    found = run(model, tmp_path, setting)
    assert found["float32"][0] == reference["float32"][0]
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.35)):
        for ours, theirs in zip(found[dtype][1], reference[dtype][1], strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance)
    for ours, exact in zip(found["bfloat16"][1], reference["float32"][1], strict=True):
        assert ours == pytest.approx(exact, abs=0.5)


def test_an_unknown_level_is_an_error(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="QUIRE_CPU_ISA is 'avx1024'; allowed: amx, avx512, avx2, portable"):
        current_platform("cpu")


def test_a_ceiling_bounds_all_below_it():
    environ = {"QUIRE_CPU_ISA": "avx2"}
    assert [cpu_isa.allows(level, environ) for level in cpu_isa.LEVELS] == [True, True, False, False]
    assert all(cpu_isa.allows(level, {}) for level in cpu_isa.LEVELS)
    cpu_isa.limit_torch(environ)
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX2" and environ["ATEN_CPU_CAPABILITY"] == "avx2"
    users = {"QUIRE_CPU_ISA": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX"}
    cpu_isa.limit_torch(users)
    assert users["ONEDNN_MAX_CPU_ISA"] == "AVX" and "ATEN_CPU_CAPABILITY" not in users


def test_bfloat16_is_not_fast_below_avx512(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
    assert str(current_platform("cpu").default_dtype("bfloat16")) == "torch.float32"


def test_the_compiler_stays_below_the_ceiling(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("quire.kernels.native.build.cpu_flags", lambda: frozenset({"avx2", "fma", "bmi2"}))
    levels = ("amx", "avx512", "avx2", "portable")
    assert [processor_flags(level) for level in levels] == [
        ("-march=native",),
        ("-march=native",),
        ("-march=haswell",),
        ("-march=x86-64",),
    ]
    monkeypatch.setattr("quire.kernels.native.build.cpu_flags", lambda: frozenset())
    assert processor_flags("avx2") == ("-march=native",)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert processor_flags("portable") == ()
