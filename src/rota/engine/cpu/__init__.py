"""What a CPU does in hardware, and with how many threads."""
