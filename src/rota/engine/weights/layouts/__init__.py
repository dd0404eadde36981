"""Layouts: how folders store matrices in few bits."""
