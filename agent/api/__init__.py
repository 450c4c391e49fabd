"""gRPC for programs: our own protocol and the Open Inference Protocol."""
