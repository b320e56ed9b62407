import dataclasses
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.fields import flag, option, options
from quire.config.flags import FlagParser, add_engine_flags, add_model_argument, engine_kwargs
from quire.config.server import ServerConfig, add_server_flags, server_config

OBJECTS = (
    "default_mm_loras",
    "hf_overrides",
    "model_class_overrides",
    "override_generation_config",
    "kv_events_config",
    "kv_transfer_config",
    "speculative_config",
    "weight_transfer_config",
    "custom_histogram_buckets",
    "pooler_config",
    "profiler_config",
)

WORDS = {"spec_method": "ngram", "sharded_state_pattern": "{rank}-{part}.safetensors"}


def parse(*argv: str) -> dict[str, Any]:
    parser = FlagParser(prog="quire test")
    add_model_argument(parser)
    add_engine_flags(parser)
    return engine_kwargs(parser.parse(argv))


def test_only_what_was_given_is_passed_on() -> None:
    assert parse() == {}
    assert parse("--block-size", "32", "--seed", "0") == {"block_size": 32, "seed": 0}


def test_every_engine_option_has_a_flag_that_reaches_the_config() -> None:
    for config in EngineConfig.parts().values():
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        for name, info in options(config).items():
            if isinstance(defaults[name], bool):
                given = parse(flag(name))
            else:
                word = WORDS.get(name, "{}" if name in OBJECTS else "1")
                given = parse(flag(name), str(info.choices[-1]) if info.choices else word)
            assert list(given) == [name]
            if name == "spec_tokens":
                given |= {"spec_method": "ngram"}
            if name == "sharded_state_pattern":
                given |= {"load_format": "sharded_state"}
            if name == "node_rank":
                given |= {"nnodes": 2, "tensor_parallel_size": 2}
            EngineConfig.from_kwargs(**given)


def test_types_follow_the_annotations() -> None:
    given = parse("--max-model-len", "512", "--gpu-memory-utilization", "0.5", "--revision", "1")
    assert given == {"max_model_len": 512, "gpu_memory_utilization": 0.5, "revision": "1"}


def test_words_in_place_of_numbers() -> None:
    for text in ("auto", "-1"):
        assert EngineConfig.from_kwargs(**parse("--max-model-len", text)).model.max_model_len is None


def test_objects_are_json() -> None:
    given = parse("--hf-overrides", '{"rope_parameters": {"factor": 2}}')
    assert given == {"hf_overrides": {"rope_parameters": {"factor": 2}}}


def test_booleans_come_in_pairs() -> None:
    assert parse("--enable-prefix-caching") == {"enable_prefix_caching": True}
    assert parse("--no-enable-prefix-caching") == {"enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("4G", 4 << 30), ("512m", 512_000_000), ("1.5K", 1536), ("1T", 1 << 40)],
)
def test_sizes_accept_a_unit(text: str, size: int) -> None:
    assert parse("--kv-cache-memory-bytes", text) == {"kv_cache_memory_bytes": size}


@pytest.mark.parametrize("argv", [["tiny", "--seed", "1"], ["--seed", "1", "tiny"], ["--seed", "1", "--model", "tiny"]])
def test_the_model_argument_may_be_anywhere(argv: list[str]) -> None:
    assert parse(*argv) == {"seed": 1, "model": "tiny"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-model-length", "5"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--max_model_length=5"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--max-model", "5"], "unknown flag --max-model"),
        (["--zzz"], "unknown flag --zzz\n"),
        (["one", "two"], "unexpected argument 'two'"),
        (["--block-size", "many"], "--block-size: 'many' is not a whole number"),
        (["--gpu-memory-utilization", "x"], "--gpu-memory-utilization: 'x' is not a number"),
        (["--kv-cache-memory-bytes", "4X"], "'4X' is not a whole number; write a number, or one with K, M, G or T"),
        (["--kv-cache-memory-bytes", "G"], "'G' is not a whole number"),
        (["--hf-overrides", "{x"], "--hf-overrides: '{x' is not JSON: "),
        (["--hf-overrides", "[1]"], "--hf-overrides: '[1]' is not a JSON object; write {...}"),
        (["--model-impl", "torch"], "--model-impl: invalid choice: 'torch' (choose from"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' (choose from"),
    ],
)
def test_mistakes_are_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert message in error


def test_help_groups_the_flags_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "The paged KV cache:" in text
    assert "--block-size N tokens in a KV-cache block (default: 16)" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text
    assert "(default: on)" in text
    assert "--kv-cache-memory-bytes SIZE" in text
    assert "--hf-overrides JSON" in text


def test_flags_of_another_command_can_be_left_out() -> None:
    parser = FlagParser(prog="quire test")
    add_engine_flags(parser, leave_out=("seed",))
    parser.add_argument("--seed", type=int)
    assert engine_kwargs(parser.parse(["--seed", "3", "--block-size", "8"]), leave_out=("seed",)) == {"block_size": 8}


def test_a_number_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Either:
        """Either."""

        threads: int | str = option("auto", "a number or auto")

    monkeypatch.setattr(EngineConfig, "parts", staticmethod(lambda: {"either": Either}))
    assert parse("--threads", "4") == {"threads": 4}
    assert parse("--threads", "auto") == {"threads": "auto"}


def serve(*argv: str) -> ServerConfig:
    parser = FlagParser(prog="quire test")
    add_model_argument(parser)
    add_server_flags(parser)
    return server_config(parser.parse(argv))


def test_several_values_of_one_flag() -> None:
    assert serve("m", "--api-key", "a", "b", "--port", "1", "--api-key", "c").api_key == ("a", "b", "c")
    assert serve("m", "--served-model-name", "big", "small").served_model_name == ("big", "small")


def test_lists_as_json_or_one_by_one() -> None:
    assert serve("--allowed-origins", '["*"]', "--allowed-headers", "[]").allowed_origins == ("*",)
    assert serve("--allowed-methods", '["GET", "PUT"]').allowed_methods == ("GET", "PUT")
    assert serve("--allowed-origins", "http://a", "--allowed-origins", "http://b").allowed_origins == (
        "http://a",
        "http://b",
    )


@pytest.mark.parametrize("text", ["[1]", "[x"])
def test_a_list_that_is_no_list_of_texts(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("--allowed-origins", text)
    assert "--allowed-origins: '[" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_a_model_behind_a_flag_of_several_values_is_not_a_key(
    flag: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for words in (["gpt2"], ["org/model"], ["org/model", "--port", "9000"]):
        with pytest.raises(SystemExit):
            serve(flag, "secret", *words)
        taken = f"{flag} took {words[0]!r} as one of its values, and no model is named; write the model before it"
        assert taken in capsys.readouterr().err
    assert serve(flag, "secret", "gpt2", "--port", "9000").port == 9000  # as in vLLM, but not without a word
    assert f"no model is named, so the default is used: all 2 words behind {flag} are its values" in caplog.text
    assert "secret" not in caplog.text
    assert serve(f"{flag}=secret", "gpt2").port == 8000
    assert serve(flag, "secret", "--", "gpt2").port == 8000
    assert serve(flag, "secret", flag, "other").port == 8000
    assert serve("m", flag, "secret", "base64/key=").port == 8000
    assert parse("--cudagraph-capture-sizes", "1", "2") == {"cudagraph_capture_sizes": [1, 2]}
    assert serve("--lora-modules", "a=/a", '{"name": "b", "path": "/b"}', "c=/c").port == 8000
    assert parse("--ignore-patterns", "a", "b/*") == {"ignore_patterns": ["a", "b/*"]}
