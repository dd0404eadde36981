"""New versions of adapters, and what clients learn of them."""
