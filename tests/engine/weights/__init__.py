"""Weights that folders store in few bits."""
