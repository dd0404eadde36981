"""Attacks on a live server by a tenant with a valid key; each measures what the other tenant notices."""
