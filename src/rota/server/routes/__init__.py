"""What the kernel's routes do; the table in `server/app.py` says which there are."""
