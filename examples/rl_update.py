"""Reinforcement learning in small: Quire writes answers, torch learns from them. Run: python examples/rl_update.py

SmolLM2 is rewarded for short words. In every round the engine samples some for each question, the trainer takes a
step of REINFORCE in torch, and the engine gets the new weights without being started again. At the end its greedy
answers are compared with those of transformers with the same weights.
"""

import argparse
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.checkpoint.resolve import resolve_model

SUBJECTS = ["the sea", "a storm", "bread", "the moon", "a map", "gold", "winter", "music", "tea", "a compass"]
END = 2  # <|im_end|>


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=6, help="answers to a question")
    parser.add_argument("--prompts", type=int, default=4, help="questions of a round")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_base()
    questions = [prompt_ids(tokenizer, f"What is {subject}?") for subject in SUBJECTS[: args.prompts]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sampled = SamplingParams(n=args.samples, max_tokens=args.max_tokens, stop_token_ids=[END], seed=0)
    with LLM(dtype="float32", quantization="dequantized", max_model_len=512) as llm:
        before = greedy(llm, questions, args.max_tokens)
        bar = tqdm(range(args.rounds), desc="Training", unit="round")
        for number in bar:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in questions], sampled, use_tqdm=False)
            answers = [[list(one.token_ids) for one in output.outputs] for output in outputs]
            lengths = [[word_length(one.text) for one in output.outputs] for output in outputs]
            learn(model, optimizer, questions, answers, lengths)
            began = time.perf_counter()
            llm.update_weights(model.state_dict(), weight_version=str(number + 1))
            mean = sum(map(sum, lengths)) / (args.prompts * args.samples)
            bar.set_postfix(letters=f"{mean:.2f}", update=f"{time.perf_counter() - began:.2f} s")
        after = greedy(llm, questions, args.max_tokens)
        version = llm.get_weight_version()
    theirs = [answer_of_transformers(model, ids, args.max_tokens) for ids in questions]
    same = sum(ours == their for ours, their in zip(after, theirs, strict=True))
    differ = sum(ours != old for ours, old in zip(after, before, strict=True))
    print(f"weights {version}: {same} of {len(theirs)} answers equal transformers', {differ} differ from those before")
    for ids, old, new in list(zip(questions, before, after, strict=True))[:2]:
        print(f"{tokenizer.decode(ids)}\n  before: {tokenizer.decode(old)!r}\n  after:  {tokenizer.decode(new)!r}")


def load_base() -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """The embedded model, as transformers has it, in float32."""
    file = Path(resolve_model(None).path)
    options = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    return model, tokenizer


def prompt_ids(tokenizer, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False).input_ids


def word_length(text: str) -> float:
    words = text.split() or [""]
    return sum(map(len, words)) / len(words)


def learn(model, optimizer, questions, answers, lengths) -> None:
    """One step towards shorter words than in the other answers to the same question."""
    optimizer.zero_grad()
    for ids, group, letters in zip(questions, answers, lengths, strict=True):
        mean = sum(letters) / len(letters)
        for answer, length in zip(group, letters, strict=True):
            tokens = torch.tensor([ids + answer])
            logits = model(input_ids=tokens).logits[0, len(ids) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, len(ids) :])
            ((mean - length) * loss / len(group)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def greedy(llm: LLM, questions, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[END])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in questions], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def answer_of_transformers(model, ids: list[int], max_tokens: int) -> list[int]:
    model.eval()
    made = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=END)
    return made[0, len(ids) :].tolist()


if __name__ == "__main__":
    main()
