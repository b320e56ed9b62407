"""A real redis-server (or valkey-server) for tests, started and stopped as they like."""

import shutil
import socket
import subprocess
import time

import pytest

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    def __init__(self, folder, port=None):
        self.folder = folder
        self.port = port or free_port()
        self.process = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self):
        redis = pytest.importorskip("redis")
        return redis.Redis(port=self.port)

    def start(self, *options):
        flags = ["--port", str(self.port), "--save", "", "--appendonly", "no", "--dir", str(self.folder), *options]
        self.process = subprocess.Popen([BINARY, *flags], stdout=subprocess.DEVNULL)
        while True:  # until it answers; a server that has ended never will
            assert self.process.poll() is None, "redis-server has ended"
            try:
                if self.client.ping():
                    return self
            except OSError:
                time.sleep(0.01)
            except Exception as error:
                if "Connection" not in type(error).__name__:
                    raise
                time.sleep(0.01)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def redis_server(tmp_path):
    pytest.importorskip("redis", reason="needs the package redis")
    if BINARY is None:
        pytest.skip("needs redis-server or valkey-server")
    server = RedisServer(tmp_path).start()
    yield server
    server.stop()
