"""Weights in four bits on a CPU: how they are written down, and the products torch has for them."""
