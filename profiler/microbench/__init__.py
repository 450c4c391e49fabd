"""What experts of a kind cost on a processor: K, B, maximum batch, footprint, load latency, precision (section 4.5)."""
