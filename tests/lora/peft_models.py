"""Tiny models with adapters of peft's, the tokens that peft gives, and engines that serve them."""

from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from quire import LLM, SamplingParams
from quire.messages.lora import LoRARequest
from tests.tiny_models import greedy, prompts, save_tiny

COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = prompts((5, 40, 17, 33, 9, 64))


class PeftModel:
    """Prompt i has adapter i % (1 + variants); 0: none."""

    def __init__(self, folder: Path, family: str, variants: list[dict[str, Any]], **overrides: Any) -> None:
        self.path = folder / "base"
        save_tiny(family, self.path, **overrides)
        self.numbers = [i % (1 + len(variants)) for i in range(len(PROMPTS))]
        self.adapters = [folder / f"adapter{i}" for i in range(1, 1 + len(variants))]
        self.models: list[Any] = []
        for number, variant in enumerate([None, *variants]):
            torch.manual_seed(number)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            if variant is not None:
                model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **variant))
                model.save_pretrained(self.adapters[number - 1])
            self.models.append(model.eval())

    @cached_property
    def texts(self) -> list[list[int]]:
        """By peft, one by one."""
        pairs = zip(self.numbers, PROMPTS, strict=True)
        found = [greedy(self.models[number], prompt, COUNT)[0] for number, prompt in pairs]
        assert len({tuple(text) for text in found}) == len(PROMPTS)
        return found

    def lora(self, number: int) -> LoRARequest | None:
        return LoRARequest(f"a{number}", number, str(self.adapters[number - 1])) if number else None

    def llm(self, **options: Any) -> LLM:
        given = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 256, "max_loras": 4}
        return LLM(str(self.path), skip_tokenizer_init=True, enable_lora=True, **(given | options))

    def generated(self, llm: LLM, params: SamplingParams = GREEDY) -> list[Any]:
        loras = [self.lora(number) for number in self.numbers]
        return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, False, loras)

    def served(self, **options: Any) -> list[list[int]]:
        """Of all prompts at the same time."""
        with self.llm(**options) as llm:
            return [list(one.outputs[0].token_ids) for one in self.generated(llm)]
