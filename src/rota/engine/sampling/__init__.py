"""Sampling: one token for each row from its logits, by its request's parameters."""
