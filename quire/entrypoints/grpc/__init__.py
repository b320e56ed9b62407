"""Generation over gRPC, beside HTTP; needs the extra `grpc`. `engine_pb2` and `engine_pb2_grpc` are for clients too."""
