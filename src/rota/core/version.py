"""The version of the package, which the build reads here; `rota.__version__` is the same."""

__version__ = "0.16.0"
