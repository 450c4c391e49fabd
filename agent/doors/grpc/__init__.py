"""gRPC: coserve.v1, the Open Inference Protocol, health and reflection."""
