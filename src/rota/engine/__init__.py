"""The tensors: torch and triton live here and nowhere else."""
