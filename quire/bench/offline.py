"""An engine in this process for `quire bench throughput`: `LLM`, or the asynchronous one that servers use."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.bench.common import profiled, timed
from quire.messages.lora import LoRARequest

if TYPE_CHECKING:
    from quire import SamplingParams
    from quire.tokenizer.tokenizer import Tokenizer

Prompts = Sequence[str | list[int]]
Adapters = Sequence[LoRARequest] | None  # one for each prompt


class Offline(Protocol):
    def generate(
        self, prompts: Prompts, params: "list[SamplingParams]", adapters: Adapters = None, profile: bool = False
    ) -> tuple[float, Any]:
        """Seconds, and the outputs in the order of the prompts."""
        ...

    def tokenizer(self) -> "Tokenizer": ...

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class OfflineLLM:
    def __init__(self, options: dict[str, Any], chat: bool) -> None:
        from quire import LLM

        self.llm = LLM(**options)
        self.chat = chat

    def generate(
        self, prompts: Prompts, params: "list[SamplingParams]", adapters: Adapters = None, profile: bool = False
    ) -> tuple[float, Any]:
        def work() -> Any:
            if self.chat:
                chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
                return self.llm.chat(chats, params, use_tqdm=False, lora_request=adapters)
            return self.llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)

        return profiled(self.llm, lambda: timed(work)) if profile else timed(work)

    def tokenizer(self) -> "Tokenizer":
        return _required(self.llm.llm_engine.tokenizer)

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def shutdown(self) -> None:
        self.llm.shutdown()


class OfflineAsyncLLM:
    """Engine in a process of its own; a coroutine per request."""

    def __init__(self, options: dict[str, Any]) -> None:
        from quire.config import EngineConfig
        from quire.engine.async_llm import AsyncLLM

        self.runner = asyncio.Runner()
        self.engine = AsyncLLM(EngineConfig.from_kwargs(**options))
        self.count = 0

    def generate(
        self, prompts: Prompts, params: "list[SamplingParams]", adapters: Adapters = None, profile: bool = False
    ) -> tuple[float, Any]:
        def work() -> tuple[float, Any]:
            return timed(lambda: self.runner.run(self._all(prompts, params, adapters)))

        return profiled(self.engine, work, self.runner.run) if profile else work()

    async def _all(self, prompts: Prompts, params: "list[SamplingParams]", adapters: Adapters) -> list[Any]:
        async def one(number: int) -> Any:
            adapter = adapters[number] if adapters else None
            name = f"{self.count}-{number}"
            async for output in self.engine.generate(prompts[number], params[number], name, lora_request=adapter):
                last = output
            return last

        self.count += 1
        return await asyncio.gather(*(one(number) for number in range(len(prompts))))

    def tokenizer(self) -> "Tokenizer":
        return _required(self.engine.tokenizer)

    def reset_prefix_cache(self) -> None:
        self.runner.run(self.engine.reset_prefix_cache())

    def shutdown(self) -> None:
        self.engine.shutdown()
        self.runner.close()


def _required(tokenizer: "Tokenizer | None") -> "Tokenizer":
    if tokenizer is None:
        raise ValueError("this dataset needs a tokenizer; leave --skip-tokenizer-init out")
    return tokenizer
