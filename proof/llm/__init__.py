"""coserve bench llm: what the runtime of language models reaches, against the peers that can be run beside it."""
