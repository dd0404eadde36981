"""Rota on one GPU: every workload we are measured on, beside the peers' rows and the targets."""
