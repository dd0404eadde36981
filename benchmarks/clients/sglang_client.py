"""SGLang's bench client without SGLang's server: run as `python sglang_client.py FLAGS OF sglang.benchmark.serving`.

The client takes one constant from the server's code, which would pull in everything that needs a GPU to be imported.
"""

from __future__ import annotations

import sys
from types import ModuleType

constants = ModuleType("sglang.srt.disaggregation.utils")
constants.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # type: ignore[attr-defined]
sys.modules[constants.__name__] = constants

from sglang.benchmark.serving import cli_main  # noqa: E402

cli_main()
