"""A server of fake engines on a Ray cluster: `python ray_server.py FLAGS …`."""

from __future__ import annotations

import sys
from functools import partial

from rota.cli import main
from rota.commands.serve import serve_model
from tests.runtime.cluster.clusters import spelling_device

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]], serve=partial(serve_model, make_device=spelling_device))
