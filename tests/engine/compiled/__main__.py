"""Compiles kernels for GPUs that need not be here, and prints what became of them as JSON.

python -m tests.engine.compiled
"""

from __future__ import annotations

import json

from tests.engine.compiled import attention, lora, ops, quantised

if __name__ == "__main__":
    modules = {"attention": attention, "lora": lora, "ops": ops, "quantised": quantised}
    print(json.dumps({name: module.told() for name, module in modules.items()}))
