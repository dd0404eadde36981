"""OpenAI's routes: chat, completions and tokens."""
