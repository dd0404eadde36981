"""The benchmark sends a workload to any server over HTTP and measures the answers."""
