"""Windows say, layer by layer, how many of the last tokens a query sees."""

from __future__ import annotations

from collections.abc import Callable

from rota.core.errors import ModelError
from rota.engine.model.config_file import ConfigFile

FULL, SLIDING = "full_attention", "sliding_attention"

# For each layer: the tokens that a query sees, its own included; None: all of them.
Windows = tuple[int | None, ...]


def read_windows(config: ConfigFile, layers: int, is_sliding: Callable[[int], bool]) -> Windows:
    """One window for each layer. `is_sliding` decides where config.json has no `layer_types`."""
    kinds = config.get("layer_types") or [SLIDING if is_sliding(layer) else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(
            f"{config.path}: 'layer_types' must name '{FULL}' or '{SLIDING}' for each of {layers} layers, "
            f"not {kinds!r}."
        )
    if SLIDING not in kinds or config.get("sliding_window") is None:
        return (None,) * layers
    window = config.whole("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def widest(windows: Windows) -> int | None:
    """The window of the layer that sees most; None if a layer sees everything."""
    if not windows or None in windows:
        return None
    return max(window for window in windows if window is not None)
