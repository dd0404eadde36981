"""The version of the package, which the build reads here, and how its extras are installed."""

from importlib import metadata

__version__ = "0.16.0"
# What an index and pip know the package by. The name of the module alone could be a stranger's.
DISTRIBUTION = "rota-lora-server"


def how_to_install(extra: str) -> str:
    """A command that works wherever Rota itself came from: it names the packages, and not the extra."""
    try:
        needs = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # its folder is on the path, and it is not installed
        return f"install what pyproject.toml lists as the extra '{extra}'"
    packages = (need.partition(";")[0].strip() for need in needs if f"extra == '{extra}'" in need.replace('"', "'"))
    return "pip install " + " ".join(f"'{package}'" for package in packages)
