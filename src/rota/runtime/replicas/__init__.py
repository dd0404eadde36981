"""Replicas are several engines behind one service."""
