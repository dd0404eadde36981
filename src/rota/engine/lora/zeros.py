"""Zeros for slots: on a CPU a slot that is never written costs no memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # The system allocates the pages of NumPy's zeros at the first write.
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)
