"""What a kind of experts costs on a processor: K, B, maximum batch, footprint, load latency, precision (CoServe, 4.5)."""
