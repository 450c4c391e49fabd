"""Images of requests: sources, decoding, preparation ahead of their batches."""
