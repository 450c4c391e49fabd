"""Language models: one runtime for dense and mixture-of-experts models that lie in Hugging Face directories."""
