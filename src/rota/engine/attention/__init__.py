"""Attention over the paged cache, in one backend per kind of device."""
