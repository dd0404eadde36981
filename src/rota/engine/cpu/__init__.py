"""The CPU: what it computes in hardware, and how many threads a step uses."""
