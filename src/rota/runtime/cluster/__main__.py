"""The driver as a program: `python -m rota.runtime.cluster LINE ADDRESS`, where LINE is an open socket to the front."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from rota.runtime.cluster.driver import attend

if __name__ == "__main__":
    attend(Connection(int(sys.argv[1])), sys.argv[2])
