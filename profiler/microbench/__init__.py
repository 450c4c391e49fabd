"""Cost of a kind of experts on a processor: K, B, maximum batch, footprint, load latency, precision (section 4.5)."""
