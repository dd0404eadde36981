"""A server of fake ranks, as torchrun would start it: `python ranks_server.py FOLDER FLAGS …`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rota.cli import main
from rota.commands.serve import serve_model
from tests.runtime.ranks.rank_devices import spelling_rank

if __name__ == "__main__":
    make_device = partial(spelling_rank, Path(sys.argv[1]))
    main(["serve", *sys.argv[2:]], serve=partial(serve_model, make_device=make_device))
