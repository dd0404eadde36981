"""Workloads say which client asks what and when; the simulator and the bench client read the same files."""
