"""Every causal language model that transformers has, tiny and random, through our engine and against its own output.

    python -m tests.models.transformers_sweep [--only NAME ...] [--output FILE]

One process per architecture: a crash or a hang is that architecture's result, and no more.
"""

import argparse
import copy
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/models/data/transformers.json"
TIME_LIMIT = 240
NUM_TOKENS = 48
PROMPT_LENGTHS = (1, 7, 19, 33)
WORKS = "works"
MAX_REASON = 200
MAX_PARAMETERS = 30_000_000

# What makes a config tiny, where it has such a value. The order matters where one name is another's alias.
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "mlp_intermediate_size": 32,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "decoder_layers": 3,
    "encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "kv_channels": 16,
    "attention_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "seq_length": 256,
    "sliding_window": 24,
    "attention_chunk_size": 64,
    "type_vocab_size": 2,
    "num_nextn_predict_layers": 0,
    "vocab_size_per_layer_input": 211,
    "hidden_size_per_layer_input": 16,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "init_method_std": 0.15,
    "std": 0.15,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_sliding_window": True,
    "add_cross_attention": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OFTEN_NONE = (
    "head_dim",
    "num_key_value_heads",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
)
# With multi-head latent attention, heads are made of other sizes.
LATENT = {"num_key_value_heads": 4, "head_dim": 8}


def tiny_config(model_type: str) -> Any:
    import transformers

    return _tiny(type(transformers.AutoConfig.for_model(model_type)))


def _tiny(cls: type) -> Any:
    config = cls()
    sizes = SIZES | (LATENT if getattr(config, "qk_rope_head_dim", None) else {})
    values = {name: value for name, value in sizes.items() if _has(config, name)}
    for name, part in getattr(cls, "sub_configs", {}).items():
        if getattr(config, name, None) is not None and isinstance(part, type) and part.__name__ != "AutoConfig":
            values[name] = _tiny(type(getattr(config, name))).to_dict()
    made = cls(**values)
    if getattr(made, "layer_types", None) and len(made.layer_types) != getattr(made, "num_hidden_layers", 0):
        kinds = list(dict.fromkeys(made.layer_types))
        made = cls(**values, layer_types=(kinds * 3)[:3])
    return made


def _has(config: Any, name: str) -> bool:
    if isinstance(own := getattr(type(config), name, None), property) and own.fset is None:
        return False
    try:
        found = getattr(config, name, None)
    except ValueError:  # it differs by layer
        return False
    return found is not None or (name in OFTEN_NONE and hasattr(config, name))


def save(model_type: str, folder: Path) -> Any:
    import torch
    import transformers

    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)  # initialised to zero, they would test nothing
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.15)  # far-apart logits: greedy choices do not hang on rounding
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return [*made, made[2] + made[1]]  # begins like another


def is_greedy(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether every token is transformers' first choice after those before it: then all are its greedy output."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


def run(folder: Path, given: list[list[int]], count: int = NUM_TOKENS, **options: Any) -> list[list[list[int]]]:
    """Tokens by each setting: all prompts at once, then the same from the prefix cache, then in chunks."""
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    settings: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}]
    results = []
    for setting in settings:
        llm = LLM(
            str(folder),
            model_impl="transformers",
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=128,
            block_size=8,
            kv_cache_memory_bytes=8 << 20,
            cpu_pin=False,
            cpu_threads=1,
            **(options | setting),
        )
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
            results.append([list(output.outputs[0].token_ids) for output in outputs])
    return results


def check(model_type: str) -> str:
    """WORKS, or why not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = save(model_type, folder)
        except Exception as error:
            return f"no tiny model of it could be made: {_line(error)}"
        try:
            results = run(folder, prompts())
        except ValueError as error:
            return _line(error).rpartition("that does not work: ")[2]
        for name, result in zip(("batched", "cached", "chunked", "chunked and cached"), results, strict=True):
            if not all(is_greedy(model, prompt, tokens) for prompt, tokens in zip(prompts(), result, strict=True)):
                return f"wrong tokens when {name}"
    return WORKS


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0] if not lines[0].endswith(":") else " ".join(lines[:2])
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def _child(model_type: str, results: Any) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        results.send(check(model_type))
    except Exception as error:
        results.send(f"failed: {_line(error)}")


def in_process(model_type: str) -> str:
    """Forked, so that transformers is imported once for all."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(TIME_LIMIT) else f"took longer than {TIME_LIMIT} s"
    except EOFError:
        process.join()
        return f"crashed (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()


def architectures() -> dict[str, str]:
    """transformers' own table: model_type -> class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="architectures at a time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(check(args.child)))
        return
    import transformers

    import quire.entrypoints.llm
    import quire.worker.worker  # noqa: F401 (before forking)

    known = architectures()
    names = args.only or list(known)
    with ThreadPoolExecutor(args.jobs) as pool:
        found = {}
        for name, result in zip(names, pool.map(in_process, names), strict=True):
            found[name] = {"architecture": known[name], "result": result}
            print(f"{name}: {result}", flush=True)
    works = sum(each["result"] == WORKS for each in found.values())
    print(f"{works} of {len(found)} work")
    if args.only and args.output.is_file():
        found = json.loads(args.output.read_text())["models"] | found
    args.output.parent.mkdir(exist_ok=True)
    report = {"transformers": transformers.__version__, "models": dict(sorted(found.items()))}
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
