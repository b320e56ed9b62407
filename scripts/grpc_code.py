"""Write quire/entrypoints/grpc/engine_pb2.py and engine_pb2_grpc.py from engine.proto.

    pip install grpcio-tools==1.75.1
    python -m scripts.grpc_code

Not a newer version of the tools without need: code that they write works with protobuf of their own major version and
the next, no other.
"""

import sys
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = "quire/entrypoints/grpc/engine.proto"


def main() -> int:
    from grpc_tools import protoc  # not a dependency: the code is committed

    common = str(resources.files("grpc_tools") / "_proto")
    arguments = [f"-I{ROOT}", f"-I{common}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", f"--grpc_python_out={ROOT}"]
    return int(protoc.main(["protoc", *arguments, PROTO]))


if __name__ == "__main__":
    sys.exit(main())
