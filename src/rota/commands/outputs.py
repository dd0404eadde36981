"""What a command shall write is checked before its work, and not after it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rota.core.errors import ConfigError


def check_outputs(files: Iterable[str | None], plot: str | None) -> None:
    """Raises ConfigError where a file's folder is missing, or matplotlib, which draws; None is a file not asked for."""
    for path in filter(None, (*files, plot)):
        if not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"There is no folder {Path(path).parent} to write {Path(path).name} into.")
    if plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'rota[plot]'.") from error
