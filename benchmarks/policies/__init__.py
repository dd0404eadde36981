"""The policies' targets, a file for each kind; benchmarks/simulated_policies.py runs them all."""
