"""Weights in few bits: their forms, and the products of a CPU and of a GPU by them."""
