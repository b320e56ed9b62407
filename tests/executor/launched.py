"""What each process of torchrun runs in test_external_launcher.py: every process makes an LLM and gets all outputs."""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from quire import LLM, SamplingParams
from quire.messages.lora import LoRARequest
from tests.executor.test_multiproc import SMALL, outputs


def main(model: str, folder: str, task: str, options: str) -> None:
    rank = int(os.environ["RANK"])
    if task == "own_group":  # a program may have made torch's process group itself
        dist.init_process_group("gloo")
    found = []
    for _ in range(2 if task == "twice" else 1):
        llm = LLM(model, skip_tokenizer_init=True, **SMALL, **json.loads(options))
        if task == "different":
            params = SamplingParams(temperature=0, max_tokens=4)
            llm.generate([{"prompt_token_ids": [5, 6, 7 + rank] * (1 + rank)}], params, use_tqdm=False)
        if task == "adapter":  # how long each process takes to read it differs
            loras = [LoRARequest("a", 1, f"{folder}/adapter"), None] * 2
            found.append(outputs(llm, loras))
        found.append(outputs(llm))
        if task == "killed":
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                outputs(llm)
            except Exception as error:
                found.append(str(error))
            break
        assert len(llm.collective_rpc("describe")) == int(os.environ["WORLD_SIZE"])
        llm.shutdown()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if task == "own_group":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
