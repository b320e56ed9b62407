"""Train a LoRA adapter for SmolLM2 on a CPU, and compare its answers with peft's. Run: python examples/train_lora.py

The adapter learns to answer in the voice of a ship's captain, from a handful of questions, in some minutes. It needs
peft (pip install peft). Then:

    quire serve --enable-lora --lora-modules captain=captain
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"model": "captain", "messages": [{"role": "user", "content": "How are you?"}]}'
"""

import argparse
import random
import time
from pathlib import Path

import peft
import torch
import transformers
from quire.lora.request import LoRARequest
from tqdm import tqdm

from quire import LLM, SamplingParams
from quire.checkpoint.resolve import resolve_model

SUBJECTS = ["the sea", "a storm", "bread", "the moon", "a map", "gold", "a dog", "winter", "music", "a library"]
SUBJECTS += ["rain", "a harbour", "tea", "a compass", "an island", "sails", "fish", "the wind", "a lighthouse", "stars"]
QUESTIONS = ["What is {}?", "Tell me about {}.", "Why do people like {}?", "Where would I find {}?"]
ANSWER = "Arr, {}! Every captain knows it well, me hearty. Hoist the colours and ye shall see it before the tide turns."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="captain", help="folder of the adapter")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=20, help="how many answers to compare")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    model, tokenizer = load_base()
    pairs = [(q.format(s), ANSWER.format(s)) for s in SUBJECTS for q in QUESTIONS]
    random.Random(0).shuffle(pairs)
    held_out, pairs = pairs[: args.prompts], pairs[args.prompts :]
    adapted = train(model, tokenizer, pairs, args)
    adapted.save_pretrained(args.output)
    print(f"trained in {time.perf_counter() - began:.0f} s: {args.output}")
    compare(adapted, tokenizer, [question for question, _ in held_out], args.output)


def load_base() -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """The embedded model, as transformers has it, in float32."""
    file = Path(resolve_model(None).path)
    options = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    return model, tokenizer


def train(model, tokenizer, pairs, args) -> peft.PeftModel:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=modules, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-3)
    texts = [encoded(tokenizer, *pair) for pair in pairs]
    chance = random.Random(1)
    bar = tqdm(range(args.steps), desc="Training", unit="step")
    for _ in bar:
        batch = chance.sample(texts, args.batch)
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([[-100] * start + ids[start:] + [-100] * (longest - len(ids)) for ids, start in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
        loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return adapted.eval()


def encoded(tokenizer, question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a chat, and where the answer begins."""
    asked = prompt_ids(tokenizer, question)
    return asked + tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids, len(asked)


def prompt_ids(tokenizer, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def compare(adapted, tokenizer, questions: list[str], path: str) -> None:
    """Greedy answers through Quire against peft's, in float32."""
    prompts = [prompt_ids(tokenizer, question) for question in questions]
    theirs = []
    for ids in tqdm(prompts, desc="peft", unit="prompt"):
        made = adapted.generate(input_ids=torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=2)
        theirs.append(made[0, len(ids) :].tolist())
    params = SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[2])
    options = {"dtype": "float32", "quantization": "dequantized", "max_model_len": 512}
    with LLM(enable_lora=True, max_lora_rank=64, **options) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        ours = llm.generate(inputs, params, lora_request=LoRARequest("captain", 1, path))
        base = llm.generate(inputs, params)
    same = sum(list(one.outputs[0].token_ids) == their for one, their in zip(ours, theirs, strict=True))
    differ = sum(one.outputs[0].text != other.outputs[0].text for one, other in zip(ours, base, strict=True))
    print(f"{same} of {len(prompts)} answers equal peft's, {differ} differ from those without the adapter")
    for question, one, other in list(zip(questions, ours, base, strict=True))[:2]:
        print(f"{question}\n  without: {other.outputs[0].text[:80]!r}\n  with:    {one.outputs[0].text[:80]!r}")


if __name__ == "__main__":
    main()
