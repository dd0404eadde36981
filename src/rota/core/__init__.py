"""The words every room speaks: frozen values, standard library only."""
