"""``python -m benchmarks TABLE``: speed of this project's kernels, beside their peers in the same process."""

from __future__ import annotations

import argparse
from types import ModuleType

from benchmarks import config_sweep, decode, decode_sweep, host, picture, prefill, seed_tilings, start

TABLES: dict[str, ModuleType] = {
    "prefill": prefill,
    "prefill-configs": config_sweep,
    "decode": decode,
    "decode-sweep": decode_sweep,
    "seed-tilings": seed_tilings,
    "host": host,
    "start": start,
    "picture": picture,
}
NO_GPU_NEEDED = ("start", "picture")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed of this project's kernels, beside their peers in the same process.",
        epilog="Options of a table: python -m benchmarks TABLE --help",
    )
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, module in TABLES.items():
        summary = (module.__doc__ or "").strip()
        module.add_arguments(tables.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args()
    if arguments.table not in NO_GPU_NEEDED:
        _require_gpu(parser)
    try:
        TABLES[arguments.table].run(arguments)
    except ValueError as error:
        parser.exit(2, f"{error}\n")


def _require_gpu(parser: argparse.ArgumentParser) -> None:
    import torch

    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA device, and torch finds none\n")


if __name__ == "__main__":
    main()
