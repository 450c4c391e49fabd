"""Texts over HTTP for OpenAI's clients: models, completions, chat completions, streamed or whole."""
