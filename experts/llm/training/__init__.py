"""Training of language models over the steps that serve them, and distillation of small ones from large ones."""
