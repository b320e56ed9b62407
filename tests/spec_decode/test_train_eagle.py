"""examples/train_eagle.py on a tiny model: what it collects, what it learns, and what it saves."""

import json
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file

from examples import train_eagle
from quire import LLM, SamplingParams
from tests.tiny_models import COMMON, save_tiny

LAYERS = (1, 2, 3)
DEFAULT = (2, 2, 1)
DRAFT_VOCAB = 64
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model's texts with their hidden states, and the head that was trained on them."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_tiny("llama", folder, initializer_range=0.05)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, COMMON["vocab_size"], (24, 6), generator=generator).tolist()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=train_eagle.MAX_STEP_TOKENS,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    texts = [train_eagle.Text(torch.tensor([*o.prompt_token_ids, *o.outputs[0].token_ids]), 6) for o in outputs]
    [(hf, embeddings, lm_head)] = llm.apply_model(train_eagle.model_parts)
    train_eagle.collect_hidden(llm, texts, LAYERS)
    llm.shutdown()

    torch.manual_seed(0)
    vocabulary = train_eagle.draft_vocabulary(texts, COMMON["vocab_size"], DRAFT_VOCAB)
    config = train_eagle.head_config(hf, DRAFT_VOCAB, LAYERS, DEFAULT)
    head = train_eagle.make_head(config, texts, lm_head, vocabulary)
    draft_ids = torch.full((COMMON["vocab_size"],), -1)
    draft_ids[vocabulary] = torch.arange(DRAFT_VOCAB)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are not worth waiting for another thread
    losses = train_eagle.train(
        head, embeddings, draft_ids, texts, NUM_DRAFTS, epochs=12, batch_size=8, learning_rate=0.01, seed=0
    )
    torch.set_num_threads(threads)
    output = tmp_path_factory.mktemp("head")
    train_eagle.save(head, config, vocabulary, output)
    return Namespace(
        folder=folder, reference=reference, texts=texts, head=head, embeddings=embeddings, lm_head=lm_head,
        vocabulary=vocabulary, losses=losses, output=output,
    )  # fmt: skip


def test_hidden_states_are_those_before_the_layers(trained):
    for text in trained.texts[:3]:
        with torch.no_grad():
            out = trained.reference(text.ids[None], output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(text.hidden.float(), wanted, rtol=0.01, atol=0.01)
        probs, ids = out.logits[0].softmax(-1).topk(train_eagle.NUM_LIKELY)
        torch.testing.assert_close(text.likely_probs, probs, rtol=1e-3, atol=1e-5)
        assert torch.equal(text.likely_ids[:, 0], ids[:, 0])


def test_weights_of_the_model(trained):
    model = trained.reference
    torch.testing.assert_close(trained.embeddings, model.get_input_embeddings().weight.detach())
    torch.testing.assert_close(trained.lm_head, model.get_output_embeddings().weight.detach(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_chain_is_unrolled_as_it_is_drafted(trained):
    """Layer by layer over one growing sequence: the model's hidden states up to p, then the chain's own."""
    head, text = trained.head, trained.texts[0]
    hidden, embeds = text.hidden.float()[None], trained.embeddings[text.ids][None]
    unrolled = list(head.unroll(hidden, embeds, NUM_DRAFTS))
    for p in (3, 17, 30):
        states = head.fc(hidden[:, : p + 1] * head.scale)
        for step in range(NUM_DRAFTS):
            out = head.midlayer(embeds[:, 1 : p + 2 + step], states, 0, [])
            torch.testing.assert_close(head.norm(out[:, -1]), unrolled[step][:, p], rtol=1e-3, atol=1e-4)
            states = torch.cat([states, out[:, -1:]], dim=1)


@torch.no_grad()
@torch.autocast("cpu", torch.bfloat16)
def test_acceptance_is_that_of_drafting(trained):
    head, texts = trained.head, trained.texts[:3]
    steps = accepted = 0
    for text in texts:
        hidden, p = text.hidden.float()[None], text.start - 1
        while p < len(text.ids) - 2:
            ids, states = text.ids[1 : p + 2].tolist(), head.fc(hidden[:, : p + 1] * head.scale)
            for _ in range(NUM_DRAFTS):
                out = head.midlayer(trained.embeddings[ids][None], states, 0, [])[:, -1:]
                states = torch.cat([states, out], dim=1)
                ids.append(int(trained.vocabulary[head.lm_head(head.norm(out)).argmax()]))
            wanted = text.ids[p + 2 : p + 2 + NUM_DRAFTS].tolist()
            right = [draft == token for draft, token in zip(ids[-NUM_DRAFTS:], wanted, strict=False)]
            count = right.index(False) if False in right else len(right)
            steps, accepted, p = steps + 1, accepted + count, p + count + 1
    _, length = train_eagle.acceptance(head, trained.embeddings, trained.vocabulary, texts, NUM_DRAFTS)
    assert length == pytest.approx(1 + accepted / steps, abs=0.1)  # rounding may change a draft


def test_the_head_learns(trained):
    assert sum(trained.losses[-5:]) < 0.8 * sum(trained.losses[:5])
    arguments = (trained.embeddings, trained.vocabulary, trained.texts, NUM_DRAFTS)
    rates, length = train_eagle.acceptance(trained.head, *arguments)
    fresh = train_eagle.EagleHead(json.loads((trained.output / "config.json").read_text()))
    assert length > train_eagle.acceptance(fresh, *arguments)[1] + 0.3
    assert len(rates) == NUM_DRAFTS and all(0 <= rate <= 1 for rate in rates)


def test_the_checkpoint_is_of_the_published_format(trained):
    config, tensors = (
        json.loads((trained.output / "config.json").read_text()),
        load_file(trained.output / "model.safetensors"),
    )
    hidden = COMMON["hidden_size"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == DRAFT_VOCAB and config["vocab_size"] == COMMON["vocab_size"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    linears = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    norms = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer = {f"midlayer.{name}.weight" for name in linears + norms}
    assert set(tensors) == layer | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (hidden, 2 * hidden)
    targets = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
    assert torch.equal(targets, tensors["t2d"].nonzero().flatten())
    fc = trained.head.fc.weight * trained.head.scale
    torch.testing.assert_close(tensors["fc.weight"].float(), fc.detach(), rtol=0.01, atol=1e-6)


def test_the_head_serves(trained):
    """The text is that of the engine without a head."""
    prompts = [{"prompt_token_ids": text.ids[:6].tolist()} for text in trained.texts[:4]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    config = {"method": "eagle3", "model": str(trained.output), "num_speculative_tokens": NUM_DRAFTS}
    llm = LLM(
        str(trained.folder), skip_tokenizer_init=True, dtype="float32", max_model_len=128, speculative_config=config
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    assert [list(o.outputs[0].token_ids) for o in outputs] == [text.ids[6:].tolist() for text in trained.texts[:4]]
