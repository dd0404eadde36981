"""Routing chooses a replica for each request, by what messages and events tell."""
