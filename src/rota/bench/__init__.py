"""A stranger with an HTTP client: asks a server what a workload says, and tells how its clients fared."""
