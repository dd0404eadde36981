"""How much memory the processes of a server hold now, and the GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from rota.runtime.lifeline import tied

# Pinned memory is no anonymous memory: the driver maps it, and it counts in VmRSS, VmPin or neither.
NAMES = ("VmRSS", "RssAnon", "VmPin", "VmLck", "VmSize")


def memory_use(pid: int) -> dict[str, float]:
    """In MB: of a process and all below it, and of the GPU where there is one."""
    return process_use(pid) | gpu_use()


def process_use(pid: int) -> dict[str, float]:
    found = dict.fromkeys(NAMES, 0.0)
    for one in family(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except FileNotFoundError:
            continue
        for name in NAMES:
            if told := re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE):
                found[name] += int(told[1]) / 1e3
    return {name: round(value, 1) for name, value in found.items()}


def family(pid: int) -> list[int]:
    pids = [pid]
    for one in pids:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                pids += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except FileNotFoundError:
            continue
    return pids


def gpu_use() -> dict[str, float]:
    if shutil.which("nvidia-smi") is None:
        return {}
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(tied([*asked]), capture_output=True, text=True, check=True)
    return {"GPU": float(told.stdout.split()[0])}
