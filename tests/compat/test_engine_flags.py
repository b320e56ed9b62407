"""Flags of the engine: what each of them changes, in an engine started with it."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.messages.sampling_params import RequestOutputKind
from quire.messages.structured import StructuredOutputsParams
from quire.metrics.kinds import Histogram
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
from quire.worker.graphs import graph_sizes
from tests.compat.conftest import Start, arguments
from tests.tiny_models import save_tiny

PROMPT = "a prompt that is longer than a block of sixteen"
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def text(llm: LLM, params: SamplingParams = GREEDY) -> str:
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def cached(llm: LLM) -> int | None:
    text(llm)
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].num_cached_tokens


def test_variables_without_effect_may_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OF_TOMORROW", "1")
    with pytest.raises(ValueError, match="without effect here: VLLM_OF_TOMORROW"):
        EngineConfig.from_kwargs(**arguments("--fail-on-environ-validation"))
    EngineConfig.from_kwargs(**arguments("--no-fail-on-environ-validation"))


def test_blocks_and_what_they_share(start: Start) -> None:
    assert cached(start("--block-size", "16")) == 32
    assert cached(start("--block-size", "8")) == 40
    assert cached(start("--no-enable-prefix-caching")) == 0


def test_hashes_of_prefixes(start: Start) -> None:
    assert cached(start("--prefix-caching-hash-algo", "sha256_cbor")) == 32
    with pytest.raises(SystemExit):
        start("--prefix-caching-hash-algo", "md5")


def test_the_size_of_the_cache(start: Start, tiny: Path) -> None:
    assert blocks(start("--num-gpu-blocks-override", "40")) == 40
    few, many = (sized(tiny, size) for size in ("1M", "2M"))
    assert 0 < few < many <= 2 * few + 1


def sized(tiny: Path, size: str) -> int:
    with LLM(**arguments(str(tiny), "--device", "cpu", "--kv-cache-memory-bytes", size)) as llm:
        return blocks(llm)


def blocks(llm: LLM) -> int:
    (info,) = [metric for metric in llm.get_metrics() if metric.name.endswith("cache_config_info")]
    return int(info.labels["num_gpu_blocks"])


class OwnLlama(LlamaForCausalLM):
    pass


def test_model_classes_of_your_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    llm = start("--model-class-overrides.LlamaForCausalLM", f"{__name__}:OwnLlama")
    assert llm.apply_model(type) == [OwnLlama] and text(llm)
    with pytest.raises(ValueError, match="write 'module:Class'"):
        EngineConfig.from_kwargs(model_class_overrides={"LlamaForCausalLM": "my.Llama"})


def test_the_longest_sequence(start: Start) -> None:
    llm = start("--max-model-len", "64")
    assert llm.llm_engine.max_model_len == 64
    with pytest.raises(ValueError, match="64"):
        llm.generate("x" * 80, GREEDY)


def test_requests_at_a_time(start: Start) -> None:
    assert start("--max-num-seqs", "3").llm_engine.config.scheduler.max_num_seqs == 3
    llm = start("--max-num-seqs", "1")
    llm.llm_engine.add_request("a", PROMPT, GREEDY)
    llm.llm_engine.add_request("b", PROMPT, GREEDY)
    llm.llm_engine.step()
    assert (llm.llm_engine.stats.num_running, llm.llm_engine.stats.num_waiting) == (1, 1)
    llm.llm_engine.abort_request(["a", "b"])


def test_tokens_that_a_step_gets(start: Start) -> None:
    steps = []
    for words in ((), ("--max-num-scheduled-tokens", "16")):
        engine = start("--no-async-scheduling", "--max-num-batched-tokens", "64", *words).llm_engine
        engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
        steps.append(1)
        while not engine.step():
            steps[-1] += 1
    assert steps == [1, 3]


def test_kernels_of_experts(tmp_path: Path) -> None:
    save_tiny("qwen3-moe", tmp_path)
    words = (str(tmp_path), "--device", "cpu", "--skip-tokenizer-init", "--num-gpu-blocks-override", "64")
    with LLM(**arguments(*words, "--moe-backend", "torch")) as llm:
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="moe_backend triton cannot be used"):
        LLM(**arguments(*words, "--moe-backend", "triton"))


def test_structured_outputs_of_all_requests(start: Start) -> None:
    words = ("--structured-outputs-config", '{"disable_any_whitespace": true}', "--hf-overrides.eos_token_id", "0")
    for given, switch in ((words, True), (words[2:], False)):
        processor = start(*given).llm_engine.input_processor
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))
        _, request = processor.process("a", PROMPT, params)
        assert request.params.structured_outputs is not None
        assert request.params.structured_outputs.disable_any_whitespace is switch


def test_priorities_need_their_policy(start: Start) -> None:
    with pytest.raises(ValueError, match="a priority needs scheduling_policy"):
        start().generate([PROMPT], GREEDY, priority=[1])
    by_priority = start("--scheduling-policy", "priority")
    assert by_priority.generate([PROMPT], GREEDY, priority=[1])
    template = "{{ messages[0].content }}"
    assert by_priority.chat([{"role": "user", "content": PROMPT}], GREEDY, False, None, [1], template)


def test_steps_ahead(start: Start) -> None:
    ahead, one_by_one = start("--async-scheduling"), start("--no-async-scheduling")
    assert (ahead.llm_engine.config.scheduler.depth, one_by_one.llm_engine.config.scheduler.depth) == (1, 0)
    assert text(ahead) == text(one_by_one)


def test_the_seed_of_requests_without_one(start: Start) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=8)
    first, again, other = (text(start("--seed", seed), drawn) for seed in ("1", "1", "2"))
    assert first == again != other


def test_the_most_logprobs(start: Start) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        text(start("--max-logprobs", "2"), SamplingParams(logprobs=3))
    llm = start("--max-logprobs", "3")
    assert text(llm, SamplingParams(logprobs=3, temperature=0))
    assert text(llm, SamplingParams(logprob_token_ids=list(range(9)), temperature=0))  # 128 of these, as in vLLM


def test_names_of_precisions(start: Start) -> None:
    assert start("--dtype", "float").llm_engine.config.model.dtype == "float32"
    assert start("--dtype", "torch.bfloat16").llm_engine.config.model.dtype == "bfloat16"


def test_weights_are_quantized(start: Start) -> None:
    assert start("-q", "int8").llm_engine.config.model.quantization == "int8"
    with pytest.raises(ValueError, match="fp8"):
        start("-q", "fp8")  # needs a GPU


def test_without_a_tokenizer(start: Start) -> None:
    llm = start("--skip-tokenizer-init")
    assert llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)[0].outputs[0].text == ""
    with pytest.raises(ValueError, match="token"):
        llm.generate("text", GREEDY)


def test_a_template_for_chats(start: Start, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    llm = start("--chat-template", str(tmp_path / "chat.jinja"))
    assert llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0].prompt == "<hello>"


def test_progress_of_loading(start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # a bar is for terminals
    start("--no-use-tqdm-on-load")
    assert "%|" not in capsys.readouterr().err
    start("--use-tqdm-on-load")
    assert "%|" in capsys.readouterr().err


def test_bounds_of_histograms(start: Start) -> None:
    llm = start("--custom-histogram-buckets", '{"request_tokens": [8, 64], "time_to_first_token": [0.5]}')
    text(llm)
    found = {metric.name: metric for metric in llm.get_metrics() if isinstance(metric, Histogram)}
    assert found["quire:request_prompt_tokens"].buckets == {"8.0": 0, "64.0": 1, "+Inf": 1}
    assert list(found["quire:time_to_first_token_seconds"].buckets) == ["0.5", "+Inf"]
    assert len(found["quire:e2e_request_latency_seconds"].buckets) > 5
    with pytest.raises(ValueError, match="custom_histogram_buckets has 'iteration_tokens'; allowed: request_latency"):
        EngineConfig.from_kwargs(custom_histogram_buckets={"iteration_tokens": [1]})
    with pytest.raises(ValueError, match="it must be a list of ascending numbers"):
        EngineConfig.from_kwargs(custom_histogram_buckets={"request_latency": [2, 1]})


def test_how_long_blocks_stay(start: Start) -> None:
    name = "quire:kv_block_lifetime_seconds"
    for words, measured in (((), False), (("--kv-cache-metrics", "--kv-cache-metrics-sample", "1"), True)):
        llm = start("--num-gpu-blocks-override", "8", "--max-model-len", "96", *words)
        llm.generate([f"{i} {PROMPT}" for i in range(6)], GREEDY, use_tqdm=False)
        counts = [metric.count for metric in llm.get_metrics() if metric.name == name and isinstance(metric, Histogram)]
        assert len(counts) == measured and all(counts)


def test_attention_backends_by_vllms_names(start: Start) -> None:
    assert start("--attention-backend", "TORCH_SDPA").llm_engine.config.device.attention_backend == "torch"
    with pytest.raises(ValueError, match="unknown attention backend 'FLASHINFER'; allowed: "):
        start("--attention-backend", "FLASHINFER")


def test_sizes_of_graphs() -> None:
    assert graph_sizes(20, 100) == ([1, 2, 4, 8, 16, 20], [32, 64])
    assert graph_sizes(20, 100, wanted=[64, 8, 1]) == ([1, 8], [64])
    assert graph_sizes(20, 100, largest=8) == ([1, 2, 4, 8], [])
    assert graph_sizes(20, 100, largest=0) == ([], [])
    with pytest.raises(ValueError, match="cudagraph_capture_sizes is 0"):
        EngineConfig.from_kwargs(cudagraph_capture_sizes=[0])


def test_tokens_come_in_parts(start: Start) -> None:
    """The first at once, then by threes, then what is left; a stream whose reader is slow gets larger parts."""
    engine = start("--stream-interval", "3").llm_engine
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", PROMPT, params)
    parts = []
    while engine.has_unfinished_requests():
        parts += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert parts == [1, 3, 3, 2]
