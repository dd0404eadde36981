"""A command checks its output files before its work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rota.core.errors import ConfigError


def check_outputs(files: Iterable[str | None], plot: str | None) -> None:
    """Raises ConfigError if a file's folder is missing, or matplotlib for a plot. None means no file."""
    for path in filter(None, (*files, plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"There is no folder {Path(path).parent} to write {Path(path).name} into.")
    if plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'rota[plot]'.") from error
