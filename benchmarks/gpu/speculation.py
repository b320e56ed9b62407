"""Speculative decoding on a GPU, against none: python -m benchmarks.gpu.speculation

An EAGLE-3 head of a published one's size, with a draft vocabulary of 32,000, runs whole after every step of a model of
Llama-3-8B's shape; then, on the device, its drafts are replaced so that each is right with a probability of 0.7 given
the ones before. Right is the text that the same engine writes when every draft is wrong: it computes as many tokens a
step, so that rounding does not lead the texts apart. All weights are random, adaptive drafting is off. Last, n-gram
lookup as it is by default on Qwen3-0.6B's shape, where nothing matches.

A token's time is the difference of runs of two lengths, so that neither prompts nor start-up count.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from quire import LLM, SamplingParams
from quire.attention.group_backends import GroupBackends
from quire.bench.workloads import MODEL_SHAPES
from quire.messages.plan import NewRow
from quire.spec_decode.eagle import Eagle3Proposer
from quire.worker.rows import RowState

HEAD = MODEL_SHAPES["llama3-8b"] | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32_000,
}
PROMPT, SHORT, LONG = 128, 64, 320  # tokens
SEED = 7


class PartlyRight(Eagle3Proposer):
    """Replaces its drafts by those of KNOWN, right ones with the given probability. Part of the captured passes."""

    KNOWN: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # prompt -> text; empty: every draft is wrong
    PROBABILITY: ClassVar[float] = 0.7

    def initialize(self, state: RowState, backends: GroupBackends, last_position: int) -> None:
        super().initialize(state, backends, last_position)
        self._state = state
        self._drafts = torch.zeros_like(state.token_ids)  # by row and position

    def add_row(self, new: NewRow) -> None:
        prompt = tuple(new.token_ids[: new.num_prompt_tokens].tolist())
        text = self.KNOWN.get(prompt, [])
        right = right_positions(len(text), self.PROBABILITY, self.num_drafts, SEED + new.row)
        drafts = [*prompt, *(token if is_right else token + 1 for token, is_right in zip(text, right, strict=True))]
        self._drafts[new.row].fill_(1)
        self._drafts[new.row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32).to(self.device)

    def _compute(self, rows: torch.Tensor, tokens_per_row: int) -> None:
        super()._compute(rows, tokens_per_row)
        ids, used = self._state.token_ids, rows.clamp(min=0).long().unsqueeze(1)
        at = self._state.num_tokens[used] + torch.arange(self.num_drafts, device=rows.device)
        # Padding writes where no draft is ever read.
        at = torch.where(rows.unsqueeze(1) >= 0, at, ids.shape[1] - 1).clamp(max=ids.shape[1] - 1)
        ids[used, at] = self._drafts[used, at]


def right_positions(length: int, probability: float, drafts: int, seed: int) -> list[bool]:
    """Where drafts are right: at random, but of such draws one that a long run's steps are like, because a text of some
    hundred tokens is a small sample."""
    expected = sum(probability**j for j in range(drafts + 1))
    generator, right = random.Random(seed), [False] * length
    for _ in range(1000):
        right = [generator.random() < probability for _ in range(length)]
        at = steps = 0
        while at < length:
            missed = next((j for j in range(drafts) if not all(right[at + j : at + j + 1])), drafts)
            at, steps = at + missed + 1, steps + 1
        if length < 100 or abs(length / steps / expected - 1) < 0.01:
            break
    return right


@contextmanager
def shape_folder(shape: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), "utf-8")
        yield folder


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(SEED)
    return [[rng.randrange(100, 100_000) for _ in range(PROMPT)] for _ in range(count)]


class Engine:
    """Texts, and milliseconds per token and request, at a batch size."""

    def __init__(
        self, folder: str, batch: int, speculative: dict[str, Any] | None, temperature: float = 0.0, **options: Any
    ) -> None:
        self.prompts, self.temperature = make_prompts(batch), temperature
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=max(batch, 8),
            enable_prefix_caching=False,
            use_tqdm_on_load=False,
            speculative_config=speculative,
            **options,
        )
        self._seconds(SHORT)  # warm-up
        for thread in threading.enumerate():
            if thread.name == "quire-compile":
                thread.join()  # kernels for other requests than these

    def ms(self) -> float:
        return 1e3 * (-self._seconds(SHORT) + self._seconds(LONG)) / (LONG - SHORT)

    def _seconds(self, length: int) -> float:
        params = SamplingParams(temperature=self.temperature, seed=SEED, max_tokens=length, ignore_eos=True)
        began = time.perf_counter()
        found = self.llm.generate([{"prompt_token_ids": ids} for ids in self.prompts], params, use_tqdm=False)
        taken = time.perf_counter() - began
        self.texts = {tuple(ids): list(one.outputs[0].token_ids) for ids, one in zip(self.prompts, found, strict=True)}
        return taken


def run(folder: str, batch: int, repetitions: int, speculative: dict[str, Any] | None) -> tuple[float, dict]:
    """Milliseconds, and the texts."""
    options = {} if speculative is None else {"spec_adaptive": False}
    engine = Engine(folder, batch, speculative, **options)
    found = statistics.median(engine.ms() for _ in range(repetitions)), engine.texts
    engine.llm.shutdown()
    return found


def eagle(batch: int, repetitions: int, drafts: int) -> None:
    with shape_folder(MODEL_SHAPES["llama3-8b"]) as model, shape_folder(HEAD) as head:
        method = {"method": "benchmarks.gpu.speculation:PartlyRight", "model": head, "num_speculative_tokens": drafts}
        PartlyRight.KNOWN.clear()
        single, _ = run(model, batch, repetitions, None)
        wrong, right_texts = run(model, batch, 1, method)
        PartlyRight.KNOWN.update(right_texts)
        guessed, texts = run(model, batch, repetitions, method)
    same = [
        next((i for i, (a, b) in enumerate(zip(text, right_texts[key], strict=True)) if a != b), LONG)
        for key, text in texts.items()
    ]
    expected = sum(PartlyRight.PROBABILITY**j for j in range(drafts + 1))
    print_ratio(f"llama3-8b, batch {batch}", "EAGLE-3", single, guessed)
    print(f"  a step with no draft accepted takes {wrong:.3f} ms, one of {expected:.2f} tokens, if acceptance is as")
    print(f"  meant, {guessed * expected:.3f}; texts agree for {min(same)} of {LONG} tokens or more")


def ngram(repetitions: int) -> None:
    """In alternating pairs: the host's speed changes."""
    method = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 8, "prompt_lookup_max": 8}
    with shape_folder(MODEL_SHAPES["qwen3-0.6b"]) as model:
        # Random tokens, which nothing repeats.
        single, looked = (Engine(model, 1, each, 1.0, num_gpu_blocks_override=4096) for each in (None, method))
        pairs = [(single.ms(), looked.ms()) for _ in range(3 * repetitions)]
    ratios = sorted(one / other for one, other in pairs)
    print_ratio("qwen3-0.6b, batch 1", "n-gram lookup", *(statistics.median(each) for each in zip(*pairs, strict=True)))
    middle = f"median {statistics.median(ratios):.3f}, quartiles {ratios[len(ratios) // 4]:.3f}"
    print(f"  of {len(pairs)} pairs: {middle} and {ratios[-1 - len(ratios) // 4]:.3f}")


def print_ratio(where: str, what: str, without: float, with_it: float) -> None:
    print(f"{where}: {without:.3f} ms a token, with {what} {with_it:.3f}: {without / with_it:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-ngram", action="store_true")
    args = parser.parse_args()
    for batch in args.batches:
        eagle(batch, args.repetitions, args.drafts)
    if not args.no_ngram:
        ngram(args.repetitions)


if __name__ == "__main__":
    # The engine imports this file by name: the class that it finds must be the one whose texts are set.
    from benchmarks.gpu import speculation

    speculation.main()
