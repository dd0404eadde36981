"""`python -m rota` is the `rota` command, also where its script is not on the path."""


def main() -> None:
    """The `rota` command."""
    # Imported here: the engine's process imports this file too, under another name, and needs no command line.
    from rota.cli import main as run

    run()


if __name__ == "__main__":
    main()
