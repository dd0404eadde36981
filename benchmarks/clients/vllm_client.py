"""What `vllm bench serve FLAGS` runs, without the command line that imports vLLM's engine."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
