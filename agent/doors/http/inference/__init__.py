"""The Open Inference Protocol over HTTP: /v2, with the binary tensor data extension."""
