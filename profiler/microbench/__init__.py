"""What each kind of experts costs on each processor: K, B, maximum batch, footprint, load latency, precision (CoServe, section 4.5)."""
