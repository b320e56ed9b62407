"""Users' logits processors in a real engine."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import openai
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.config.flags import FlagParser, add_engine_flags, engine_kwargs
from quire.sample import user_processors
from quire.sample.user_processors import processor_classes
from tests.entrypoints.server_process import server_process
from tests.sample.user_examples import Counting, NoRepeat, NoRepeatForVllm, OnlyToken
from tests.tiny_models import prompts, save_tiny

HERE = "tests.sample.user_examples"
PROMPTS = prompts((3, 17, 40))
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processors")
    return str(folder), save_tiny("llama", folder)


@pytest.fixture(scope="module")
def no_repeats(tiny) -> list[list[int]]:
    """What greedy decoding without repetition gives, computed with transformers."""
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = tiny[1](torch.tensor([tokens])).logits[0, -1]
            logits[torch.tensor(tokens)] = float("-inf")
            tokens.append(int(logits.argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


def start(tiny, *processors, **arguments) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True}
    return LLM(tiny[0], logits_processors=processors, **{**defaults, **arguments})


def params(extra_args=None, **more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "extra_args": extra_args, **more})


def tokens(outputs) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_depth": 1},
        {"async_depth": 2},
        {"num_gpu_blocks_override": 7, "max_model_len": 80},  # preemption
        {"max_num_batched_tokens": 16, "max_num_seqs": 2},
        {"multiprocess": True},
    ],
)
def test_results_do_not_depend_on_the_schedule(tiny, no_repeats, arguments):
    with start(tiny, NoRepeat, f"{HERE}:OnlyToken", Counting, **arguments) as llm:
        asked = [params({"no_repeat": True})] * 3 + [params(), params({"target_token": 5}), params({"lead": 100})]
        outputs = tokens(llm.generate([*PROMPTS, *PROMPTS], asked, use_tqdm=False))
        preempted = llm.llm_engine.stats.num_preemptions
    assert outputs[:3] == no_repeats
    assert outputs[3] != no_repeats[0]  # a request without it is unchanged
    assert outputs[4] == [5] * NUM_TOKENS
    assert outputs[5] == list(range(100, 100 + NUM_TOKENS))
    assert preempted > 0 or "num_gpu_blocks_override" not in arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"async_depth": 2},
        {"num_gpu_blocks_override": 7, "max_model_len": 80},  # preemption
        {"max_num_batched_tokens": 16, "max_num_seqs": 2},
    ],
)
def test_processors_written_for_vllm(tiny, no_repeats, arguments):
    with start(tiny, NoRepeatForVllm, f"{HERE}:OnlyTokenForVllm", **arguments) as llm:
        asked = [params({"no_repeat": True})] * 3 + [params(), params({"target_token": 5}), params({"target_token": 7})]
        outputs = tokens(llm.generate([*PROMPTS, *PROMPTS], asked, use_tqdm=False))
        again = tokens(llm.generate(PROMPTS[::-1], params({"no_repeat": True}), use_tqdm=False))
        with pytest.raises(ValueError, match="target_token must be an int"):
            llm.generate(PROMPTS[:1], params({"target_token": "x"}), use_tqdm=False)
    assert outputs[:3] == no_repeats and outputs[3] != no_repeats[0] and again == no_repeats[::-1]
    assert outputs[4:] == [[5] * NUM_TOKENS, [7] * NUM_TOKENS]


@pytest.fixture(scope="module")
def llm(tiny):
    with start(tiny, f"{HERE}:OnlyToken", f"{HERE}:NoRepeat", f"{HERE}:Faulty") as llm:
        yield llm


def test_several_completions(llm):
    drawn = params({"no_repeat": True}, n=3, temperature=1.0, seed=3)
    made = tokens(llm.generate(PROMPTS, drawn, use_tqdm=False))
    assert len(made) == 9 and len(set(map(tuple, made))) == 9
    for i, one in enumerate(made):
        both = PROMPTS[i // 3] + one
        assert len(set(one)) == NUM_TOKENS and not set(one) & set(PROMPTS[i // 3]), both


def test_logprobs_are_raw_or_processed(tiny, llm):
    asked = params({"target_token": 5}, logprobs=0, max_tokens=2)
    raw = llm.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0].logprobs
    assert raw[0][5].logprob < -0.1
    with start(tiny, OnlyToken, logprobs_mode="processed_logprobs") as other:
        processed = other.generate(PROMPTS[0], asked, use_tqdm=False)[0].outputs[0].logprobs
    assert processed[0][5].logprob == 0


def test_wrong_arguments_are_refused(tiny, llm):
    with pytest.raises(ValueError, match=r"extra_args: target_token is 'x'; .* \(OnlyToken\)"):
        llm.generate(PROMPTS, [params(), params({"target_token": "x"}), params()], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="extra_args "):
        params([1])
    with pytest.raises(ValueError, match="extra_args "):
        params({1: 2})
    with start(tiny) as plain, pytest.raises(ValueError, match="the engine has none"):
        plain.generate(PROMPTS, params({"target_token": 5}), use_tqdm=False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("add_row", "Faulty failed in add_row: KeyError: 'no such thing'"),
        ("apply", "Faulty failed in apply: RuntimeError: something broke"),
        ("panic", "Panic: something broke"),
        ("exit", "SystemExit: something broke"),
        ("shape", r"Faulty returned a tensor \[\d+, 210\] of torch.float32 for a tensor \[\d+, 211\]"),
    ],
)
def test_a_failure_ends_its_step_and_names_the_processor(llm, fault, message):
    broken = llm.generate(PROMPTS[0], params({"fault": fault}), use_tqdm=False)[0]
    assert broken.outputs[0].finish_reason == "error"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(broken.error)
    assert tokens(llm.generate(PROMPTS[1], params({"target_token": 9}), use_tqdm=False)) == [[9] * NUM_TOKENS]


def test_a_failure_in_remove_row_fails_no_request(llm, caplog):
    for _ in range(2):
        asked = [params({"fault": "remove_row"}), params({"target_token": 9})]
        outputs = llm.generate(PROMPTS[:2], asked, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert "Faulty failed in remove_row: KeyError: 'no such row'" in caplog.text


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ("tests.sample.nowhere:OnlyToken", "'tests.sample.nowhere:OnlyToken' cannot be imported"),
        (f"{HERE}:Nobody", "has no attribute 'Nobody'"),
        (f"{HERE}:a_function", "it must be a class"),
        (f"{HERE}:Incomplete", "lacks add_row, remove_row, sampled"),
        (f"{HERE}:IncompleteForVllm", "lacks apply, is_argmax_invariant"),
        (f"{HERE}:NoConstructor", "cannot be created"),
        (HERE, "it must be module:Class"),
        (":OnlyToken", "it must be module:Class"),
        (7, "it must be module:Class"),
    ],
)
def test_wrong_classes_are_refused(tiny, processor, message):
    with pytest.raises(ValueError, match=message):
        start(tiny, processor)


def test_flags_and_options():
    parser = FlagParser()
    add_engine_flags(parser)
    args = parser.parse(["--logits-processors", "a:B", "--logits-processors", "c.d:E"])
    assert EngineConfig.from_kwargs(**engine_kwargs(args)).model.logits_processors == ("a:B", "c.d:E")
    assert EngineConfig.from_kwargs(logits_processors="a:B").model.logits_processors == ("a:B",)
    assert EngineConfig.from_kwargs(logits_processors=[OnlyToken]).model.logits_processors == (OnlyToken,)
    assert EngineConfig.from_kwargs(logits_processors=None).model.logits_processors == ()


def test_plugins_come_after_those_given_and_once(tiny, monkeypatch):
    points = [EntryPoint("counting", f"{HERE}:Counting", user_processors.GROUP)]
    monkeypatch.setattr(user_processors, "plugins", lambda: points)
    assert processor_classes([OnlyToken]) == [OnlyToken, Counting]
    assert processor_classes([Counting, f"{HERE}:Counting"]) == [Counting]
    with start(tiny) as llm:
        made = llm.generate(PROMPTS[0], params({"lead": 7}, max_tokens=3), use_tqdm=False)
    assert tokens(made) == [[7, 8, 9]]
    points.append(EntryPoint("gone", "tests.nowhere:Gone", user_processors.GROUP))
    with pytest.raises(ValueError, match=r"the plugin 'gone' .* cannot be loaded"):
        processor_classes([])


def test_an_installed_plugin_is_found_and_the_front_end_needs_no_torch(tmp_path):
    """As a package manager installs it: a folder on the path with metadata."""
    info = tmp_path / "counting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[quire.logits_processors]\ncounting = {HERE}:Counting\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']\n"
        "from quire.sample.user_processors import processor_classes, validators\n"
        f"classes = processor_classes(['{HERE}:OnlyToken'])\n"
        "print([one.__name__ for one in classes], len(validators(classes)), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "['OnlyToken', 'Counting'] 1 False", done.stderr


def test_through_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ".")
    with server_process(
        tmp_path, "--logits-processors", f"{HERE}:OnlyToken", "--num-gpu-blocks-override", "256"
    ) as server:
        client = server.client()
        asked = {"model": client.models.list().data[0].id, "prompt": "Once", "max_tokens": 3, "temperature": 0}
        answer = client.completions.create(
            **asked, extra_body={"vllm_xargs": {"target_token": 9}, "return_token_ids": True}
        )
        assert answer.choices[0].token_ids == [9] * 3
        plain = client.completions.create(**asked, extra_body={"return_token_ids": True})
        assert plain.choices[0].token_ids != [9] * 3
        with pytest.raises(openai.BadRequestError, match="target_token is 'x'") as error:
            client.completions.create(**asked, extra_body={"vllm_xargs": {"target_token": "x"}})
        assert error.value.param == "vllm_xargs"
