"""Adapters on the device: their files, the bank that holds them in slots, and the operations that apply them."""
