"""A trainer that broadcasts weights to the workers of an engine."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import LLM
from quire.weights.trainer import WeightSender
from tests.weights.models import ENGINE, state_of, tokens, tokens_of, two_models

GLOO = {"weight_transfer_config": {"backend": "gloo"}}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_trainer_broadcasts_weights():
    old, new = two_models("llama")
    sender = WeightSender("127.0.0.1", free_port(), workers=1, backend="gloo")
    with LLM(old, dtype="float32", **ENGINE, **GLOO) as llm, ThreadPoolExecutor(1) as trainer:
        connected = trainer.submit(sender.connect, 60)
        llm.init_weight_transfer_engine({"init_info": sender.init_info})
        connected.result()
        for folder in (new, old):
            state = state_of(folder)
            llm.start_weight_update()
            sent = trainer.submit(sender.send, state)
            llm.update_weights({"update_info": sender.update_info(state)})
            sent.result()
            llm.finish_weight_update()
            assert tokens(llm) == tokens_of(folder, dtype="float32")
        llm.shutdown_weight_transfer_engine()


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"master_address": "127.0.0.1"}, "init_info lacks master_port, world_size"),
        ({"master_address": "127.0.0.1", "master_port": 0, "world_size": 2}, "master_port is 0"),
        ({"master_address": "127.0.0.1", "master_port": 9, "world_size": 1}, "world_size is 1"),
        ({"nccl_unique_id_b64": "x"}, "nccl_unique_id_b64 and packed are not available"),
    ],
)
def test_what_cannot_be_met_is_refused(info, why):
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE, **GLOO) as llm:
        with pytest.raises(ValueError, match=why):
            llm.init_weight_transfer_engine({"init_info": info})
        llm.start_weight_update()
        with pytest.raises(ValueError, match="connect it"):
            llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": []}})


def test_an_engine_without_a_way_to_a_trainer():
    old, _ = two_models("llama")
    with LLM(old, dtype="float32", **ENGINE) as llm, pytest.raises(ValueError, match="--weight-transfer-config"):
        llm.init_weight_transfer_engine({"init_info": {}})
    with (
        LLM(old, dtype="float32", **ENGINE, weight_transfer_config={"backend": "nccl"}) as llm,
        pytest.raises(ValueError, match='"nccl" needs a GPU; allowed here: gloo'),
    ):
        llm.init_weight_transfer_engine({"init_info": {}})
    for config, why in (({"backend": "ipc"}, "not available yet; allowed: nccl, gloo"), ({"x": 1}, "allowed: backend")):
        with pytest.raises(ValueError, match=why):
            LLM(old, weight_transfer_config=config)
