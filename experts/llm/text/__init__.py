"""Words and tokens: a model's tokenizer and chat template, and text that grows token by token until it ends."""
