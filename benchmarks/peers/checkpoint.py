"""The same weights for every engine: a GGUF file made a bf16 checkpoint, and a bf16 GGUF.

    python -m benchmarks.peers.checkpoint --model FILE.gguf --output FOLDER

With transformers and gguf. FOLDER holds the safetensors checkpoint with its tokenizer, and model-bf16.gguf.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BF16_FILE = "model-bf16.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    write_checkpoint(args.model, args.output)
    write_bf16_gguf(args.model, args.output / BF16_FILE)


def write_checkpoint(file: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # The weights are plain by now, but transformers refuses to save what it once knew as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def write_bf16_gguf(file: Path, target: Path) -> None:
    """Matrices in bf16, vectors in f32, everything else as in `file`."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
