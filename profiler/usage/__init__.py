"""Usage probabilities: how likely a request is to use each expert (CoServe, section 4.5)."""
