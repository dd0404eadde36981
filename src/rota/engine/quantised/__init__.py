"""Weights in four bits on a CPU: their format, and torch's products for them."""
