"""Strings become tokens and tokens become strings; nothing here knows tensors."""
