"""Texts over HTTP as OpenAI's clients ask for them: models, completions, chat completions, streamed or whole."""
