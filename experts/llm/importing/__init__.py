"""Import of trainers' checkpoints as directories that are served."""
