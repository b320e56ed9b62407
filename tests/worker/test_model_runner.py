from quire import LLM, SamplingParams
from tests.tiny_models import save_tiny


class NoGraphs:
    """Has no graph for any step."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run_decode(self, rows, prefix_len, adapters):
        self.asked.append("decode")

    def run_mixed(self, rows, num_tokens, adapters):
        self.asked.append("mixed")


def test_only_steps_with_prompt_logprobs_stay_off_the_graphs(tmp_path):
    save_tiny("qwen3", tmp_path)
    arguments = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    prompt, params = list(range(3, 12)), SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=1)
    with LLM(str(tmp_path), max_num_batched_tokens=4, async_scheduling=False, **arguments) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        runner.graphs = graphs = NoGraphs()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert len(output.prompt_logprobs) == len(prompt) and all(output.prompt_logprobs[1:])
    # The prompt takes three steps, of which the last has one token and needs no logprobs.
    assert graphs.asked == ["decode"] * 5
