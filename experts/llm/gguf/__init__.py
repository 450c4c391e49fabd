"""Language models in GGUF files, llama.cpp's format: as the files and tensors of a Hugging Face directory."""
