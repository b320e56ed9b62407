"""What machines of one engine say to one another, and the keys of their connections."""

import hashlib
import importlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from quire.config import EngineConfig
from quire.config.environment import QUIRE_CLUSTER_TOKEN
from quire.config.fields import flag, options
from quire.executor.worker_processes import beat_seconds

SHORTEST_TOKEN = 16
WORKERS, NODES = b"w", b"n"  # the first frame: messages of workers follow, or one of those below
# What every node may choose for itself; the rest of these parts decides what workers compute.
OWN = {"model", "tokenizer", "tokenizer_mode", "tokenizer_revision", "chat_template", "hf_token", "hf_config_path"}
OWN |= {"generation_config", "override_generation_config", "skip_tokenizer_init", "max_logprobs", "seed"}
OWN |= {"node_rank", "master_addr", "distributed_timeout_seconds", "distributed_executor_backend"}
OWN |= {"scheduling_policy", "stream_interval", "max_num_queued_reqs", "max_num_queued_tokens", "spec_model"}
OWN |= {"gpu_memory_utilization", "cpu_memory_utilization", "prefix_caching_hash_algo", "enable_prefix_caching"}
PARTS = ("model", "cache", "scheduler", "parallel", "speculative")


class Hello(msgspec.Struct, tag=True):
    """A node wants to join."""

    node: int
    version: str
    devices: int | None  # GPUs; None: it computes on its CPU
    options: dict[str, str]


class Welcome(msgspec.Struct, tag=True):
    """All nodes have joined: start the workers."""


class End(msgspec.Struct, tag=True):
    """The engine has ended, in order if there is no cause; or will not start."""

    cause: str | None


NodeMessage = Hello | Welcome | End


def write_message(message: Any) -> list[bytes]:
    return [NODES, msgspec.msgpack.encode(message)]


def read_message(frames: Sequence[Any]) -> Any:
    """A ValueError for anything but a well-formed message."""
    if len(frames) != 2 or bytes(frames[0]) != NODES:
        raise ValueError("not a message between nodes")
    return msgspec.msgpack.decode(bytes(frames[1]), type=NodeMessage)


def introduction(config: EngineConfig, devices: int | None) -> Hello:
    version = importlib.import_module(__name__.partition(".")[0]).__version__
    return Hello(config.parallel.node_rank, version, devices, shared_options(config))


def shared_options(config: EngineConfig) -> dict[str, str]:
    """What all nodes must agree on, in words."""
    found: dict[str, str] = {}
    for part in PARTS:
        settings = getattr(config, part)
        found |= {flag(name): repr(getattr(settings, name)) for name in options(type(settings)) if name not in OWN}
    found["--device"] = config.device.device
    stored = json.dumps(config.model.hf_config, sort_keys=True, default=str)
    found["the model's config.json"] = hashlib.sha256(stored.encode()).hexdigest()[:16]
    return found


def difference(mine: Hello, other: Hello, needed: int) -> str | None:
    """Why that node cannot join this one, if it cannot. `needed`: ranks of a node."""
    name = f"node {other.node}"
    if other.version != mine.version:
        return f"{name} has quire {other.version}, node 0 has {mine.version}; all nodes must have the same"
    for option in sorted(mine.options.keys() | other.options.keys()):
        ours, theirs = mine.options.get(option), other.options.get(option)
        if ours != theirs:
            return f"{name} has {option} {theirs}, node 0 has {ours}; all nodes must have the same"
    if other.devices is not None and other.devices < needed:
        return (
            f"{name} has {other.devices} GPU{'' if other.devices == 1 else 's'}, but gets {needed} ranks; allowed: at "
            "most a rank for each (--tensor-parallel-size x --pipeline-parallel-size / --nnodes)"
        )
    return None


def cluster_token() -> str:
    token = QUIRE_CLUSTER_TOKEN.get()
    if len(token) < SHORTEST_TOKEN:
        what = "is too short" if token else "is not set"
        raise ValueError(
            f"{QUIRE_CLUSTER_TOKEN.name} {what}: several machines (--nnodes) need a secret of at least "
            f"{SHORTEST_TOKEN} characters in the environment, the same on all, such as from: openssl rand -hex 32"
        )
    return token


def secure(socket: zmq.Socket, token: str, server: bool) -> None:
    """Encrypt the connection with keys made of the token. The server's public key is never sent: who does not know the
    token knows no key to connect with."""
    keys = {name: _keys(token, name) for name in ("server", "client")}
    public, secret = keys["server" if server else "client"]
    socket.curve_publickey, socket.curve_secretkey = public, secret
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys["server"][0]


def _keys(token: str, name: str) -> tuple[bytes, bytes]:
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=f"quire-{name}".encode()).digest())
    return zmq.curve_public(secret), secret


def watch_link(socket: zmq.Socket, limit: float) -> zmq.Socket:
    """A socket that tells of connections of this one, which count as lost after so many seconds of silence."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if limit:
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(beat_seconds(limit) * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limit * 1000))
    return socket.get_monitor_socket(
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_MONITOR_STOPPED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    )


def ranks_text(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
