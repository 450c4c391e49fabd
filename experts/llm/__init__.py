"""Language models: one runtime for dense and mixture-of-experts models, stored as Hugging Face directories."""
