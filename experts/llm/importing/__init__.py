"""Import of trainers' checkpoints as servable directories."""
