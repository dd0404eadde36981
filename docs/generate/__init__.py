"""Pages of documentation that are made from the code: `make docs` writes them, and a test holds them current."""
