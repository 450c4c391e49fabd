"""A language model's files: its architecture, the names of its tensors, checkpoints and tokenizer files."""
