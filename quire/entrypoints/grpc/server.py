"""The gRPC server of an API process, in its event loop."""

import importlib.util
import logging
import socket
from pathlib import Path

from quire.config.server import ServerConfig
from quire.entrypoints.http.context import ServerContext

logger = logging.getLogger("quire")

IDLE_SECONDS = 60  # after which a connection without calls is closed: each takes a file descriptor


def check_grpc(config: ServerConfig) -> None:
    """Before the model is loaded: ValueError if it could not be served."""
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
        raise ValueError("--grpc-port needs grpcio and protobuf: pip install 'quire[grpc]'")
    if config.ssl_keyfile_password is not None:
        raise ValueError("--grpc-port cannot be used with --ssl-keyfile-password: gRPC reads plain keys only")
    if config.api_server_count > 1 and config.grpc_port == 0:
        raise ValueError("--grpc-port 0 is a free port, and several API processes must share one; name it")
    if config.grpc_port:
        host = config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, config.grpc_port))
            except OSError as error:
                message = f"cannot listen on {host}:{config.grpc_port}: {error.strerror} (--grpc-port)"
                raise ValueError(message) from None


class GrpcServer:
    def __init__(self, context: ServerContext) -> None:
        import grpc.aio

        from quire.entrypoints.grpc.service import EngineService

        config = context.config
        options = [
            ("grpc.max_receive_message_length", config.max_request_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", config.h11_max_incomplete_event_size),
            ("grpc.server_handshake_timeout_ms", round(1000 * config.timeout_request_headers)),
            ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
            # All API processes accept from one port; else a port that is taken must be an error.
            ("grpc.so_reuseport", int(config.api_server_count > 1)),
        ]
        most = config.max_connections or 8192
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        self.service = EngineService(context)
        self._server.add_generic_rpc_handlers(tuple(self.service.handlers()))
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        if config.ssl_certfile is not None and config.ssl_keyfile is not None:
            pair = (Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes())
            roots = Path(config.ssl_ca_certs).read_bytes() if config.ssl_ca_certs is not None else None
            credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=config.ssl_cert_reqs == 2)
            self.port = self._server.add_secure_port(address, credentials)
        else:
            self.port = self._server.add_insecure_port(address)
        self.address = f"{host}:{self.port}"

    async def start(self) -> None:
        await self._server.start()
        logger.info("gRPC at %s", self.address)

    async def stop(self, seconds: float) -> None:
        """Running calls have `seconds` to end."""
        await self._server.stop(seconds)
