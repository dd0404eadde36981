"""Replicas on the machines of a Ray cluster: Ray finds a machine for each, and says when one is gone."""
