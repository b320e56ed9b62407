"""Train an EAGLE-3 head for a model on the model's own answers. Run: python examples/train_eagle.py --output my-head

The model answers prompts, its hidden states are collected, and a head of one decoder layer learns to draft the tokens
that follow. Minutes on a CPU for the embedded SmolLM2-135M-Instruct. The head is saved in the published format:

    quire serve --speculative-config '{"method": "eagle3", "model": "my-head", "num_speculative_tokens": 3}'
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from quire import LLM, SamplingParams

PROMPTS = Path(__file__).with_name("eagle_prompts.json")
MAX_STEP_TOKENS, MAX_STEP_TEXTS = 4096, 32  # in one forward pass while hidden states are collected
MIN_STEP_TOKENS = 512  # smaller passes may be replayed without a call of the model's layers
MAX_TEXT_TOKENS = 2048
NUM_LIKELY = 16  # tokens kept of the model's distribution at each position
STEP_DECAY = 0.8  # weight of a draft in the loss, relative to the draft before it
HEAD_RATE = 0.3  # learning rate of lm_head and norms, relative to that of matrices


@dataclass
class Text:
    """A prompt with its answer, and what the model computed for them."""

    ids: torch.Tensor  # [n]
    start: int  # of the answer
    hidden: torch.Tensor | None = None  # [n, 3 * hidden size]: the residual stream before three of the layers
    likely_ids: torch.Tensor | None = None  # [n, NUM_LIKELY]: most likely next tokens, best first
    likely_probs: torch.Tensor | None = None


class RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        self.theta = config["rope_theta"]
        heads, kv_heads = config["num_attention_heads"] * self.head_dim, config["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(2 * hidden, heads, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, hidden, bias=False)

    def forward(self, x: torch.Tensor, step: int, past: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """x: [b, n, 2 * hidden]. Position p of step j stands for position p + j: it attends to positions up to p of
        step 0, whose hidden states are the model's, and to position p of the later steps, drafts of its own chain."""
        b, n, _ = x.shape
        q, k, v = (
            proj(x).view(b, n, -1, self.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        past.append((self._rotate(k, step), v))
        own = torch.eye(n, dtype=torch.bool, device=x.device)
        mask = torch.cat([torch.ones_like(own).tril(), *[own] * step], dim=1) if step else None
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*past, strict=True))
        out = F.scaled_dot_product_attention(
            self._rotate(q, step), keys, values, mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))

    def _rotate(self, x: torch.Tensor, step: int) -> torch.Tensor:
        half = self.head_dim // 2
        inv_freq = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(x.shape[2], device=x.device) + step, inv_freq)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn, self.mlp = Attention(config), MLP(config)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, step: int, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(x, step, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleHead(nn.Module):
    """Parameters have the names of published checkpoints. `scale` is folded into `fc` when the head is saved."""

    scale: torch.Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)
        self.register_buffer("scale", torch.ones(3 * hidden), persistent=False)

    def unroll(self, hidden: torch.Tensor, embeds: torch.Tensor, num_drafts: int) -> Iterator[torch.Tensor]:
        """For each draft j, inputs of `lm_head` [b, n, hidden]: position p drafts token p + 2 + j from the model's
        hidden states up to p, its tokens up to p + 1, and the j drafts between, which are taken to be right."""
        state, past = self.fc(hidden * self.scale), []
        for step in range(num_drafts):
            embeds = torch.cat([embeds[:, 1:], torch.zeros_like(embeds[:, :1])], dim=1)
            state = self.midlayer(embeds, state, step, past)
            yield self.norm(state)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        weights = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return weights | {"fc.weight": self.fc.weight.detach() * self.scale}


def read_prompts(path: Path, num_prompts: int, seed: int) -> tuple[list[str], list[str]]:
    """Prompts to train on, and some held out. A file has a prompt in each line, as text or as JSON with "prompt"; our
    own has templates and topics, and topics are held out whole."""
    rng = random.Random(seed)
    if path.suffix == ".json":
        train, held_out = [], []
        for group in json.loads(path.read_text()):
            topics = rng.sample(group["topics"], len(group["topics"]))
            num_held_out = max(1, len(topics) // 10)
            for i, topic in enumerate(topics):
                (held_out if i < num_held_out else train).extend(t.format(topic) for t in group["templates"])
    else:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        prompts = [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
        rng.shuffle(prompts)
        held_out, train = prompts[: len(prompts) // 10], prompts[len(prompts) // 10 :]
    if not train or not held_out:
        raise SystemExit(f"{path}: at least 10 prompts are needed")
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train[:num_prompts], held_out[: max(1, num_prompts // 16)]


def answer(llm: LLM, prompts: Sequence[str], max_tokens: int, temperature: float) -> list[Text]:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return [
        Text(
            torch.tensor([*o.prompt_token_ids, *o.outputs[0].token_ids])[: MAX_TEXT_TOKENS - 1], len(o.prompt_token_ids)
        )
        for o in outputs
    ]


def collect_hidden(llm: LLM, texts: Sequence[Text], layers: Sequence[int]) -> None:
    """Run the texts through the model as prompts, as many at once as one step takes."""
    seen: dict[Any, torch.Tensor] = {}

    def observe(model: Any) -> list[Any]:
        def before(layer: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                x, residual = args[:2]
                seen[layer] = x.clone() if residual is None else x + residual

            return hook

        def after(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            seen["ids"], seen["output"] = args[0].clone(), output.clone()

        return [model.layers[i].register_forward_pre_hook(before(i)) for i in layers] + [
            model.register_forward_hook(after)
        ]

    def likely(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        best = [torch.softmax(model.compute_logits(x).float(), -1).topk(NUM_LIKELY) for x in seen["output"].split(256)]
        return torch.cat([b.indices for b in best]).cpu(), torch.cat([b.values for b in best]).cpu()

    [hooks] = llm.apply_model(observe)
    progress = tqdm(total=sum(len(text.ids) for text in texts), desc="Hidden states", unit="token")
    rest = list(texts)
    while rest:
        batch, total = [], 0
        while rest and len(batch) < MAX_STEP_TEXTS and (total := total + len(rest[0].ids)) <= MAX_STEP_TOKENS:
            batch.append(rest.pop(0))
        repeats = math.ceil(MIN_STEP_TOKENS / sum(len(text.ids) for text in batch))
        prompts = [{"prompt_token_ids": text.ids.tolist()} for text in batch] * repeats
        seen.clear()
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        joined = torch.cat([text.ids for text in batch])
        if "ids" not in seen or not torch.equal(seen["ids"].cpu().long(), joined.repeat(repeats)):
            raise RuntimeError(f"{len(prompts)} texts were not computed in one step; lower MAX_STEP_TEXTS")
        hidden = torch.cat([seen[i] for i in layers], dim=-1).to("cpu", torch.bfloat16)
        sizes = [len(text.ids) for text in batch]
        parts = [x[: len(joined)].split(sizes) for x in (hidden, *llm.apply_model(likely)[0])]
        for text, *own in zip(batch, *parts, strict=True):
            text.hidden, text.likely_ids, text.likely_probs = (part.clone() for part in own)
        progress.update(len(joined))
    progress.close()
    for hook in hooks:
        hook.remove()


def draft_vocabulary(texts: Sequence[Text], vocab_size: int, draft_vocab_size: int) -> torch.Tensor:
    """The tokens that the model is most likely to choose, in ascending order. Its probabilities tell more than the few
    tokens it chose; of tokens that are never likely, lower ids come first: merges of frequent text."""
    expected = torch.zeros(vocab_size)
    for text in texts:
        expected.index_add_(
            0, text.likely_ids[text.start - 1 :].flatten(), text.likely_probs[text.start - 1 :].flatten()
        )
    return expected.argsort(descending=True, stable=True)[:draft_vocab_size].sort().values


def to_batches(texts: Sequence[Text], size: int, rng: random.Random | None = None) -> list[list[Text]]:
    """Texts of about equal length together; with `rng` in random order."""
    order = rng.sample(list(texts), len(texts)) if rng else list(texts)
    groups = [sorted(order[i : i + 8 * size], key=lambda t: len(t.ids)) for i in range(0, len(order), 8 * size)]
    batches = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    if rng:
        rng.shuffle(batches)
    return batches


def stack(texts: Sequence[Text], field: str, device: torch.device) -> torch.Tensor:
    """[b, longest, ...], padded with zeros."""
    return nn.utils.rnn.pad_sequence([getattr(text, field) for text in texts], batch_first=True).to(device)


def distillation_loss(
    head: EagleHead, embeddings: torch.Tensor, draft_ids: torch.Tensor, batch: Sequence[Text], num_drafts: int
) -> torch.Tensor:
    """Cross-entropy of drafts against the model's distribution, over a chain of drafts for every token of the answers.
    draft_ids: [vocab], -1 where a token is not in the draft vocabulary."""
    device = embeddings.device
    ids, hidden = stack(batch, "ids", device), stack(batch, "hidden", device)
    targets, probs = draft_ids[stack(batch, "likely_ids", device)], stack(batch, "likely_probs", device)
    usable = targets[..., 0] >= 0
    probs = probs * (targets >= 0)
    probs, targets = probs / probs.sum(-1, keepdim=True).clamp_min(1e-9), targets.clamp_min(0)
    positions = torch.arange(ids.shape[1], device=device)
    starts = torch.tensor([text.start for text in batch], device=device)[:, None]
    ends = torch.tensor([len(text.ids) for text in batch], device=device)[:, None]
    loss, weights = torch.zeros((), device=device), 0.0
    for step, x in enumerate(head.unroll(hidden, embeddings[ids], num_drafts)):
        shift = 1 + step  # position p is compared with the model at p + shift, which chooses token p + shift + 1
        drafts = ((positions >= starts - 1) & (positions + shift < ends - 1))[:, : ids.shape[1] - shift]
        drafts = drafts & usable[:, shift:]
        logits = head.lm_head(x[:, : ids.shape[1] - shift][drafts]).float()
        wanted, p = targets[:, shift:][drafts], probs[:, shift:][drafts]
        entropy = logits.logsumexp(-1) - (logits.gather(1, wanted) * p).sum(-1)
        loss = loss + STEP_DECAY**step * entropy.sum() / max(1, len(entropy))
        weights += STEP_DECAY**step
    return loss / weights


@torch.no_grad()
def acceptance(
    head: EagleHead, embeddings: torch.Tensor, vocabulary: torch.Tensor, texts: Sequence[Text], num_drafts: int
) -> tuple[list[float], float]:
    """Of greedy drafts in greedy answers: how often each is accepted if those before it are, and tokens a step."""
    drafted, accepted, steps = [0] * num_drafts, [0] * num_drafts, 0
    for batch in to_batches(texts, 8):
        ids, hidden = stack(batch, "ids", embeddings.device), stack(batch, "hidden", embeddings.device)
        right = []
        with torch.autocast(embeddings.device.type, torch.bfloat16):
            for step, x in enumerate(head.unroll(hidden, embeddings[ids], num_drafts)):
                drafts = vocabulary[head.lm_head(x).argmax(-1)]
                right.append((drafts == F.pad(ids, (0, 2 + step))[:, 2 + step :]).tolist())
        for row, text in enumerate(batch):
            p, end = text.start - 1, len(text.ids) - 2
            while p < end:
                steps, chain = steps + 1, [right[draft][row][p] for draft in range(min(num_drafts, end - p))]
                for draft, is_right in enumerate(chain):
                    drafted[draft] += 1
                    if not is_right:
                        break
                    accepted[draft] += 1
                    p += 1
                p += 1
    rates = [a / max(1, d) for a, d in zip(accepted, drafted, strict=True)]
    return rates, 1 + sum(accepted) / max(1, steps)


def train(
    head: EagleHead,
    embeddings: torch.Tensor,
    draft_ids: torch.Tensor,
    texts: Sequence[Text],
    num_drafts: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> list[float]:
    """Losses of the steps."""
    rng = random.Random(seed)
    matrices = [p for name, p in head.named_parameters() if p.dim() == 2 and name != "lm_head.weight"]
    others = [head.lm_head.weight, *(p for p in head.parameters() if p.dim() == 1)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate * HEAD_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    batches = [batch for _ in range(epochs) for batch in to_batches(texts, batch_size, rng)]
    warm_up = max(1, len(batches) // 20)
    losses: list[float] = []
    progress = tqdm(batches, desc="Training", unit="step")
    for i, batch in enumerate(progress):
        factor = min((i + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * i / len(batches))))
        with torch.autocast(embeddings.device.type, torch.bfloat16):
            # Chains grow: a first draft costs a third of three, and the others need it.
            loss = distillation_loss(head, embeddings, draft_ids, batch, 1 + num_drafts * i // len(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, base in zip(optimizers, (learning_rate, learning_rate * HEAD_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{sum(losses[-20:]) / len(losses[-20:]):.3f}")
    return losses


def head_config(
    hf: dict[str, Any], draft_vocab_size: int, layers: Sequence[int], default: Sequence[int]
) -> dict[str, Any]:
    """config.json of the head: a layer of the model's own shape, so that its keys fit the model's KV cache."""
    heads = hf["num_attention_heads"]
    rope = hf.get("rope_parameters") or {}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope_theta": float(hf.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "vocab_size": hf["vocab_size"],
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if list(layers) != list(default):
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return config


def make_head(
    config: dict[str, Any], texts: Sequence[Text], lm_head: torch.Tensor, vocabulary: torch.Tensor
) -> EagleHead:
    """Starts from the model's own output weights. Some channels of a residual stream are hundreds of times larger than
    others: inputs are divided by each channel's deviation, or training would see little else."""
    head = EagleHead(config)
    sample = torch.cat([text.hidden.float() for text in texts[:64] if text.hidden is not None])
    with torch.no_grad():
        head.scale.copy_(1 / sample.std(0).clamp_min(1e-3))
        head.lm_head.weight.copy_(lm_head[vocabulary])
        # Queries equal to keys: a position attends to itself at first, where the last token is.
        attention = head.midlayer.self_attn
        attention.k_proj.weight.normal_(0, 0.03)
        keys = attention.k_proj.weight.view(config["num_key_value_heads"], 1, attention.head_dim, -1)
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        attention.q_proj.weight.copy_(keys.expand(-1, groups, -1, -1).flatten(0, 2))
    return head


def save(head: EagleHead, config: dict[str, Any], vocabulary: torch.Tensor, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in head.checkpoint().items()}
    vocabulary = vocabulary.cpu()
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))  # offsets
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, vocabulary, True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def model_parts(model: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Config, embeddings and output weights [vocab, hidden], whatever the model is quantized to."""
    if not hasattr(model, "layers") or not hasattr(model, "hf"):
        raise SystemExit(f"{type(model).__name__} is not a decoder whose layers can be observed")
    device = next(iter(model.rotaries.buffers()), torch.zeros(0)).device
    vocab_size, hidden_size = model.config.vocab_size, model.config.hidden_size
    with torch.no_grad():
        embeddings = model.embed(torch.arange(vocab_size, device=device, dtype=torch.int32))
        lm_head = model.compute_logits(torch.eye(hidden_size, device=device, dtype=embeddings.dtype)).T
    return model.hf, embeddings.float().cpu().clone(), lm_head.float().cpu().clone()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="HF folder, .gguf file or hub id; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, default=Path("eagle3-head"), help="folder for the head")
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help="a prompt in each line: text, or JSON with 'prompt'"
    )
    parser.add_argument("--num-prompts", type=int, default=1200, help="to train on, two answers each")
    parser.add_argument("--max-tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--layers", type=int, nargs=3, help="whose inputs the head reads; default: 2, n // 2, n - 3")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens that can be drafted")
    parser.add_argument("--num-drafts", type=int, default=3, help="drafts of a chain in training")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4, help="texts in a training step")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args, began = parse_args(argv), time.perf_counter()
    torch.manual_seed(args.seed)
    prompts, held_out_prompts = read_prompts(args.prompts, args.num_prompts, args.seed)
    llm = LLM(
        args.model,
        max_model_len=MAX_TEXT_TOKENS,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        enable_prefix_caching=False,
    )
    [(hf, embeddings, lm_head)] = llm.apply_model(model_parts)
    num_layers = hf["num_hidden_layers"]
    default = (2, num_layers // 2, num_layers - 3)
    layers = args.layers or default
    if not all(0 <= layer < num_layers for layer in layers):
        raise SystemExit(f"--layers {list(layers)}: the model has layers 0 to {num_layers - 1}")
    # Greedy answers are what greedy requests get; sampled ones show the head what else the model says.
    texts = [text for temperature in (0.0, 0.8) for text in answer(llm, prompts, args.max_tokens, temperature)]
    random.Random(args.seed).shuffle(texts)
    held_out = answer(llm, held_out_prompts, args.max_tokens, 0.0)
    collect_hidden(llm, [*texts, *held_out], layers)
    llm.llm_engine.shutdown()
    generated = time.perf_counter()

    vocabulary = draft_vocabulary(texts, hf["vocab_size"], min(args.draft_vocab, hf["vocab_size"]))
    config = head_config(hf, len(vocabulary), layers, default)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = make_head(config, texts, lm_head, vocabulary).to(device)
    embeddings, vocabulary = embeddings.to(device), vocabulary.to(device)
    draft_ids = torch.full((hf["vocab_size"],), -1, device=device)
    draft_ids[vocabulary] = torch.arange(len(vocabulary), device=device)
    losses = train(
        head, embeddings, draft_ids, texts, args.num_drafts, args.epochs, args.batch_size, args.learning_rate, args.seed
    )
    trained = time.perf_counter()
    save(head, config, vocabulary, args.output)
    rates, length = acceptance(head, embeddings, vocabulary, held_out, args.num_drafts)

    num_tokens = sum(len(text.ids) - text.start for text in texts)
    parameters = sum(p.numel() for p in head.parameters())
    tail = losses[-20:]
    print(f"answers: {num_tokens:,} tokens of {len(texts)} texts in {generated - began:.0f} s")
    print(f"training: {len(losses)} steps in {trained - generated:.0f} s, to a loss of {sum(tail) / len(tail):.2f}")
    print(f"on {len(held_out)} prompts not trained on, greedy, {args.num_drafts} drafts:")
    for i, rate in enumerate(rates):
        print(f"  draft {i + 1}: accepted {rate:.1%} of the time when those before it were")
    print(f"  {length:.2f} tokens a step")
    print(f"saved {parameters / 1e6:.1f}M parameters to {args.output}")


if __name__ == "__main__":
    main()
