"""Sampling: one token a row from its logits, as each request asked."""
