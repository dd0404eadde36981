"""OpenAI's routes: chat, completions, tokens."""
