"""Score multiple choices offline through prompt_logprobs: offline_choices.py ITEMS.json, with Quire's Python."""

import json
import sys
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams


def main(items: list[dict[str, Any]]) -> None:
    """Prints the accuracy, and the sum of logprobs of each choice after its question."""
    with_choices = [
        (str(item["question"]), f"{item['question']} {choice}") for item in items for choice in item["choices"]
    ]  # type: ignore[attr-defined]
    llm = LLM(max_model_len=4096, kv_cache_memory_bytes=512 << 20)
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate([text for _, text in with_choices], SamplingParams(max_tokens=1, prompt_logprobs=0))
    sums = []
    for (question, _), output in zip(with_choices, outputs, strict=True):
        ids = output.prompt_token_ids
        after = range(len(tokenizer.encode(question)), len(ids))
        sums.append(sum(output.prompt_logprobs[at][ids[at]].logprob for at in after))
    by_item = [sums[at : at + 4] for at in range(0, len(sums), 4)]
    right = [max(range(4), key=one.__getitem__) == item["label"] for one, item in zip(by_item, items, strict=True)]
    print(json.dumps({"acc": sum(right) / len(right), "sums": by_item}))


if __name__ == "__main__":
    main([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()])
