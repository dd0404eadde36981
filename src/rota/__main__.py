"""`python -m rota` is the `rota` command, also where its script is not on the path."""

from rota.cli import main

# The engine's process imports this file again under another name, and must not start a second command.
if __name__ == "__main__":
    main()
