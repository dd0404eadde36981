"""The HTTP server speaks the APIs of OpenAI, vLLM and SGLang, and refuses with a sentence what it does not support."""
