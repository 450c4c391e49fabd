"""What programs ask of the line: gRPC, under its own protocol and the Open Inference Protocol's."""
