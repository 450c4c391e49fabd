"""From checkpoints as they were trained to directories that can be served."""
