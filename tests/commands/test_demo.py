from __future__ import annotations

import pytest
import typer

from rota.commands.demo import demo_command
from rota.core.config import EngineConfig


@pytest.mark.parametrize(("arguments", "is_quiet"), [([], False), (["--quiet"], True), (["--disable-tqdm"], True)])
def test_a_demo_can_be_told_to_be_quiet(arguments, is_quiet):
    served: list[EngineConfig] = []
    app = typer.Typer(add_completion=False)
    app.command()(demo_command(serve=lambda config, server, begin: served.append(config)))
    app(arguments, standalone_mode=False)

    assert [config.quiet for config in served] == [is_quiet]
    assert served[0].lora.max_loras_per_batch == 3
