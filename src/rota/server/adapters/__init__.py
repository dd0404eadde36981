"""Adapters while the server runs: loaded, renewed, listed, found and unloaded."""
