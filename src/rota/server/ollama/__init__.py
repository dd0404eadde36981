"""Ollama's routes, for programs that speak nothing else."""
