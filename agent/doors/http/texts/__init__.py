"""Texts over HTTP for OpenAI's clients: models, completions, chats, responses, embeddings."""
