"""What sentence-transformers' files say of a model: without options, results are those of its library."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quire import LLM, PoolingParams
from quire.checkpoint.sentence_transformers import read_modules
from quire.entrypoints.pooling.inputs import Truncation
from quire.entrypoints.pooling.scoring import Pairs, ScoreOptions, score_prompts
from tests.encoders.tiny_encoders import save_tiny_encoder
from tests.pooling import models
from tests.pooling.references import ARGUMENTS

NO, YES = 9, 7
QUERY, DOCUMENTS = models.text(4), [models.text(length, 1) for length in (3, 30, 11)]
INSTRUCTION = "w20 w21"
TEMPLATE = (
    "{% for message in messages %}{{ {'system': 'w5', 'query': 'w6', 'document': 'w7', 'user': 'w8'}[message.role] }} "
    "{{ message.content }} {% endfor %}w11"
)
MODULE = "sentence_transformers.base.modules."


def engine(folder, **arguments) -> LLM:
    return LLM(str(folder), **ARGUMENTS | {"skip_tokenizer_init": False} | arguments)


def write(folder, name: str, value: object) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def write_modules(folder, *kinds: str, **configs: object) -> None:
    """As the library does: the first module in the folder itself, the others in folders of their own."""
    modules = [{"idx": i, "path": f"{i}_{kind}" if i else "", "type": MODULE + kind} for i, kind in enumerate(kinds)]
    write(folder, "modules.json", modules)
    for i, kind in enumerate(kinds):
        if kind in configs:
            write(folder, f"{i}_{kind}/config.json" if i else "sentence_bert_config.json", configs[kind])


def of_messages(*roles: str) -> dict[str, object]:
    """Of a Transformer module: the kinds of input."""
    return {"modality_config": {role: {"method": "forward", "format": "flat"} for role in roles}}


@pytest.mark.parametrize(("false", "activation"), [(NO, "activation.Sigmoid"), (None, "linear.Identity")])
def test_a_reranker_that_says_yes_or_no(tmp_path, false, activation):
    """As Qwen3-Reranker: the model's own chat template makes a prompt of both texts."""
    model = models.save("Qwen3ForCausalLM", tmp_path)
    tokenizer = models.add_tokenizer(tmp_path, TEMPLATE)
    score = {"true_token_id": YES, "false_token_id": false}
    write_modules(tmp_path, "Transformer", "LogitScore", Transformer=of_messages("text", "message"), LogitScore=score)
    texts = {"prompts": {"web": INSTRUCTION}, "default_prompt_name": "web"}
    write(tmp_path, "config_sentence_transformers.json", texts | {"activation_fn": f"torch.nn.modules.{activation}"})

    def prompt(document: str, instruction: str) -> list[int]:
        roles = {"system": instruction, "query": QUERY, "document": document}
        messages = [{"role": role, "content": text} for role, text in roles.items()]
        return tokenizer.apply_chat_template(messages, return_dict=False)

    def expected(document: str) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([prompt(document, INSTRUCTION)])).logits[0, -1]
        return float(logits[YES]) if false is None else float((logits[YES] - logits[NO]).sigmoid())

    with engine(tmp_path) as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        own = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, use_tqdm=False)
        # Where a prompt is cut, what the template writes after the texts stays.
        options = ScoreOptions(Truncation(15), template_kwargs={"instruction": "w30"})
        cut = score_prompts(llm._pooling_inputs, Pairs([QUERY], DOCUMENTS), options, llm._chat_renderer)
    whole = [prompt(document, "w30") for document in DOCUMENTS]
    assert [len(ids) <= 15 for ids in whole] == [True, False, False]
    assert [one.token_ids for one in cut] == [whole[0], *([*ids[:14], ids[-1]] for ids in whole[1:])]
    scores = [expected(document) for document in DOCUMENTS]
    assert [output.outputs.score for output in found] == pytest.approx(scores, abs=1e-4)
    assert [output.outputs.score for output in own] == pytest.approx(scores, abs=1e-4)


def test_texts_are_messages_where_the_files_say_so(tmp_path):
    model = models.save("Qwen3Model", tmp_path)
    tokenizer = models.add_tokenizer(tmp_path, TEMPLATE)
    config = of_messages("text", "message") | {"max_seq_length": 100}
    write_modules(tmp_path, "Transformer", "Pooling", Transformer=config, Pooling={"pooling_mode": "lasttoken"})
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": INSTRUCTION}})
    with engine(tmp_path, max_model_len=None) as llm:
        found = llm.embed(DOCUMENTS, use_tqdm=False)
        named = llm.embed([DOCUMENTS[0], {"prompt": DOCUMENTS[1]}], prompt_name="query", use_tqdm=False)
        assert llm.llm_engine.max_model_len == 100
    for output, document, first in zip(
        [*found, *named], [*DOCUMENTS, *DOCUMENTS], [None] * 3 + [INSTRUCTION] * 2, strict=False
    ):
        roles = {"system": first, "user": document} if first else {"user": document}
        messages = [{"role": role, "content": text} for role, text in roles.items()]
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)]))
        assert np.abs(np.array(output.outputs.embedding) - hidden.last_hidden_state[0, -1].numpy()).max() < 1e-4


def test_an_encoder_s_limits(tmp_path):
    """Embeddings are shortened, texts become lower-case, and are as long as the tokenizer says."""
    model = save_tiny_encoder("bert", tmp_path)
    tokenizer = models.add_tokenizer(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize", Transformer={"do_lower_case": True}, Pooling={})
    write(tmp_path, "config_sentence_transformers.json", {"truncate_dim": 24})
    write(
        tmp_path,
        "tokenizer_config.json",
        json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"model_max_length": 90},
    )
    with engine(tmp_path, max_model_len=None) as llm:
        assert llm.llm_engine.max_model_len == 90
        short, upper = llm.embed([DOCUMENTS[1], DOCUMENTS[1].upper()], use_tqdm=False)
        (whole,) = llm.embed(DOCUMENTS[1], pooling_params=PoolingParams(dimensions=64), use_tqdm=False)
    with torch.no_grad():
        vector = model(**tokenizer(DOCUMENTS[1], return_tensors="pt")).last_hidden_state[0].mean(dim=0)
    for output, count in ((short, 24), (upper, 24), (whole, 64)):
        expected = F.normalize(vector[:count], dim=0).tolist()
        assert output.outputs.embedding == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("kinds", "pooling", "why"),
    [
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "has Transformer, Pooling, Normalize, Dense; available"),
        (("Transformer", "MultiVectorMask"), {}, "has the module 'MultiVectorMask'; allowed: Transformer, LogitScore"),
        (("Transformer", "LogitScore"), {}, "true_token_id is None"),
    ],
)
def test_modules_that_would_give_other_vectors_are_refused(tmp_path, kinds, pooling, why):
    write_modules(tmp_path, *kinds, Pooling=pooling, Dense={}, LogitScore={"false_token_id": 3})
    if "Dense" in kinds:
        (tmp_path / f"{kinds.index('Dense')}_Dense" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=why):
        read_modules(tmp_path)


def test_a_path_that_is_none(tmp_path):
    for path in ("../elsewhere", "/tmp", "x" * 10_000):
        write(tmp_path, "modules.json", [{"type": MODULE + "Dense", "path": path}])
        with pytest.raises(ValueError, match="is not in the model's folder"):
            read_modules(tmp_path)


def test_several_pooling_modes_are_none_of_ours(tmp_path):
    write_modules(tmp_path, "Transformer", "Pooling", Pooling={"pooling_mode": ["mean", "cls"]})
    found = read_modules(tmp_path)
    assert found is not None and (found.pooling_type, found.unknown_pooling) == (None, "mean and cls")
    write_modules(tmp_path, "Transformer", "Pooling", Pooling={"pooling_mode": ["cls"]})
    found = read_modules(tmp_path)
    assert found is not None and (found.pooling_type, found.unknown_pooling) == ("CLS", None)
