"""vLLM's ways to write a command line."""

from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.server import server_config
from quire.config.vllm.syntax import human_integer
from quire.entrypoints.cli import serve
from tests.compat.conftest import arguments


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--max_model_len", "512"], {"max_model_len": 512}),
        (["--max_model_len=512"], {"max_model_len": 512}),
        (["--max-model-len", "8k"], {"max_model_len": 8000}),
        (["--max-model-len=8K"], {"max_model_len": 8192}),
        (["--max-num-batched-tokens", "1.5k"], {"max_num_batched_tokens": 1500}),
        (["--kv-cache-memory-bytes", "2G"], {"kv_cache_memory_bytes": 2 << 30}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["-q", "fp8"], {"quantization": "fp8"}),
        (["-tp", "1", "-pp=1"], {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
        (["-sc", "{}"], {"speculative_config": {}}),
        (["-O3"], {"optimization_level": 3}),
        (["-O", "2"], {"optimization_level": 2}),
        (["-O=1"], {"optimization_level": 1}),
        (["--hf-overrides.a", "1"], {"hf_overrides": {"a": 1}}),
        (["--hf_overrides.rope_parameters.factor=2.5"], {"hf_overrides": {"rope_parameters": {"factor": 2.5}}}),
        (["--hf-overrides.a", "x", "--hf-overrides.b", "true"], {"hf_overrides": {"a": "x", "b": True}}),
        (["--hf-overrides.size", "4k"], {"hf_overrides": {"size": 4000}}),
        (["--hf-overrides", '{"b": {"c": 2}}', "--hf-overrides.b.d", "1"], {"hf_overrides": {"b": {"c": 2, "d": 1}}}),
        (["--hf-overrides.a", "1", '--hf_overrides={"a": 2, "b": 2}'], {"hf_overrides": {"a": 1, "b": 2}}),
        (["--compilation-config.mode", "3"], {"compilation_config": {"mode": 3}}),
        (["-cc.cudagraph_capture_sizes+", "1,2", "-cc.cudagraph_capture_sizes+=4"], {
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}
        }),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--dtype=float"], {"dtype": "float32"}),
        (["--dtype", "torch.bfloat16"], {"dtype": "bfloat16"}),
        (["--load-format", "hf"], {"load_format": "auto"}),
        (["--prefix-caching-hash-algo", "sha256_cbor"], {"prefix_caching_hash_algo": "sha256"}),
        (["--cudagraph-capture-sizes", "1", "2"], {"cudagraph_capture_sizes": [1, 2]}),
        (["--kv-offloading-size", "None"], {"kv_offloading_size": None}),
        (["--quantization", "None", "--revision=None"], {"quantization": None, "revision": None}),
        (["--safetensors-load-strategy", "None"], {"safetensors_load_strategy": None}),
        (["--guided-decoding-backend", "guidance"], {"structured_outputs_backend": "guidance"}),
        (["--device-ids", "0", "1"], {"device_ids": ["0", "1"]}),
    ],
)  # fmt: skip
def test_words(words: list[str], given: dict[str, Any]) -> None:
    assert arguments("m", *words) == {"model": "m", **given}


def test_short_forms_of_the_server() -> None:
    assert server_config(serve.parser().parse(["-asc", "3"])).api_server_count == 3


@pytest.mark.parametrize(("text", "number"), [("7", 7), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("1M", 1 << 20)])
def test_sizes(text: str, number: int) -> None:
    assert human_integer(text) == number


def test_precisions_of_torch_in_python() -> None:
    import torch

    assert EngineConfig.from_kwargs(dtype=torch.bfloat16).model.dtype == "bfloat16"
    assert EngineConfig.from_kwargs(dtype="half", prefix_caching_hash_algo="xxhash_cbor").model.dtype == "float16"


def test_a_value_may_be_negative_and_have_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments("--max-model-len", "-1") == {"max_model_len": -1}
    with pytest.raises(SystemExit):
        arguments("--hf-overrides.a")
    assert "--hf-overrides.a needs a value" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments("--nowhere.a", "1")
    assert "unknown flag --nowhere.a" in capsys.readouterr().err


def test_a_model_behind_a_flag_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("--collect-detailed-traces", "all", "org/model")
    assert "--collect-detailed-traces took 'org/model' as one of its values" in capsys.readouterr().err


def test_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: tiny\nport: 9001\nmax_model_len: 8k\nenable-prefix-caching: false\ntrust_remote_code: true\n"
        "served-model-name: [big, small]\napi-key: [one]\nhf-overrides:\n  rope_parameters:\n    factor: 2\n"
        "seed: null\nenable-lora: false\n"
    )
    args = serve.parser().parse(["--config", str(file)])
    config = server_config(args)
    assert (config.port, config.served_model_name, config.api_key) == (9001, ("big", "small"), ("one",))
    assert arguments("--config", str(file)) == {
        "model": "tiny",
        "max_model_len": 8000,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "hf_overrides": {"rope_parameters": {"factor": 2}},
        "enable_lora": False,
    }
    # The command line has precedence, wherever it names the file, and its lists replace the file's.
    args = serve.parser().parse(["other", "--port", "9002", f"--config={file}", "--api-key", "two", "three"])
    config = server_config(args)
    assert (args.model, config.port, config.api_key) == ("other", 9002, ("two", "three"))
    assert config.served_model_name == ("big", "small")


def test_keys_of_objects_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("hf-overrides: {b: 2}\nhf_overrides.a: true\nhf-overrides.sizes: [1, 2]\nhf-overrides.none: null\n")
    config = ["--config", str(file)]
    given = {"b": 2, "a": True, "sizes": [1, 2], "none": None}
    assert arguments(*config) == {"hf_overrides": given}
    assert arguments(*config, "--hf-overrides.b", "3") == {"hf_overrides": given | {"b": 3}}
    assert arguments(*config, "--hf-overrides", "{}", "--hf-overrides.b", "3") == {"hf_overrides": {"b": 3}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--hf-overrides", "x", "--hf-overrides.a", "1"],
            "--hf-overrides is 'x'; with keys such as --hf-overrides.KEY",
        ),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "1"], "--hf-overrides.a.b: a is 1, which has no keys"),
        (["--hf-overrides.a", "1", "--hf-overrides.a+", "1"], "--hf-overrides.a+: a is 1, which is no list"),
    ],
)
def test_keys_that_do_not_fit(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("m", *words)
    assert message in capsys.readouterr().err


def test_lists_of_a_file_keep_every_entry(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: org/m\nmiddleware: [b:B, auth:A]\nallowed-origins: ['https://a', 'https://b']\n"
        "served_model_name: [big, small]\nlora-modules: [{name: a, path: b}, c=d]\n"
    )
    args = serve.parser().parse(["--config", str(file)])
    config = server_config(args)
    assert (args.model, config.middleware) == ("org/m", ("b:B", "auth:A"))
    assert (config.allowed_origins, config.served_model_name) == (("https://a", "https://b"), ("big", "small"))
    assert config.lora_modules == ('{"name": "a", "path": "b"}', "c=d")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("flags.json", "{}", "must be a .yaml or .yml file"),
        ("flags.yaml", "[", "is not YAML"),
        ("flags.yaml", "- a", "must map flags to values"),
        ("flags.yaml", "prot: 1", "unknown flag --prot; did you mean --port?"),
        ("flags.yaml", "port: many", "'many' is not a whole number"),
        ("flags.yaml", "api-key:", "api-key is empty, and the server would be open; give a key"),
        ("flags.yaml", "api_key: []", "api_key is empty, and the server would be open; give a key"),
        ("flags.yaml", "api-key-file: null", "api-key-file is empty"),
        ("flags.yaml", "api-key: [null]", "api-key has an empty entry"),
    ],
)
def test_files_that_are_wrong(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit):
        arguments("--config", str(tmp_path / name))
    assert message in capsys.readouterr().err


def test_a_file_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--config", "nowhere.yaml"], "nowhere.yaml"), (["--config"], "--config needs a value")):
        with pytest.raises(SystemExit):
            arguments(*words)
        assert message in capsys.readouterr().err
