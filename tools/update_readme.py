"""Fills the README's tables from what was measured and from the config table, so that no figure is typed by hand.

python -m tools.update_readme [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cute_attn.arch import ARCHS
from cute_attn.configs import SEED_CONFIGS, TABLE

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
OURS = "cute_attn"
NOT_MEASURED = "Not measured yet."


def prefill() -> str:
    """Speed beside the peers, ratios first."""
    results = _results("prefill.json")
    if results is None:
        return NOT_MEASURED
    peers = list(results["geometric_mean_ratio"])
    header = ["dtype", "head dim", "length", "causal", *(f"over {peer}" for peer in peers), OURS, *peers]
    rows = [_prefill_row(row, peers) for row in results["rows"]]
    means = [_number(results["geometric_mean_ratio"][peer], 2) for peer in peers]
    rows.append(["geometric mean", "", "", "", *(f"**{mean}**" for mean in means), *([""] * (1 + len(peers)))])
    descriptions = "; ".join(f"{name} = {what}" for name, what in results["peers"].items())
    picture = "![Speed by length](benchmarks/results/prefill.svg)\n\n" if (RESULTS / "prefill.svg").exists() else ""
    return f"{results['unit']}. {descriptions}. {_where(results['environment'])}\n\n{picture}{_table(header, rows)}"


def _prefill_row(row: dict[str, Any], peers: list[str]) -> list[str]:
    return [
        {"float16": "fp16", "bfloat16": "bf16"}[row["dtype"]],
        str(row["head_dim"]),
        str(row["length"]),
        "yes" if row["causal"] else "no",
        *(_number(row["ratio"].get(peer), 2) for peer in peers),
        *(_number(row["tflops"].get(name), 0) for name in (OURS, *peers)),
    ]


def decode() -> str:
    """Decode's microseconds beside the peers', ratios first."""
    results = _results("decode.json")
    if results is None:
        return NOT_MEASURED
    names = list(results["rows"][0]["microseconds"])
    rows = [_decode_row(row, names) for row in results["rows"]]
    heads, heads_kv = results["heads"]
    read = _number(results["read_bandwidth_gb_per_s"], 0)
    return (
        f"{results['unit']}; {heads} query heads on {heads_kv} of the cache, head dim {results['head_dim']}; GB/s "
        f"of the cache's bytes, where summing 4 GB reached {read}. {_where(results['environment'])}"
        f"\n\n{_table(['batch', 'length', 'cuDNN over ours', *names], rows)}"
    )


def _decode_row(row: dict[str, Any], names: list[str]) -> list[str]:
    length = f"{row['length']}{' in a CUDA graph' if row['graph'] else ''}"
    times = (
        f"{_number(row['microseconds'].get(name), 1)} ({_number(row['gb_per_s'].get(name), 0)} GB/s)" for name in names
    )
    return [str(row["batch"]), length, _number(row["ratio"], 2), *times]


def host() -> str:
    """Host time of a call."""
    results = _results("host.json")
    if results is None:
        return NOT_MEASURED
    rows = [[name, _number(time, 1)] for name, time in results["host"].items()]
    return f"{_where(results['environment'])}\n\n{_table(['call', 'microseconds'], rows)}"


def gpu_tests() -> str:
    """What the committed record of the GPU tests says."""
    record = _results("gpu_tests.json")
    if record is None:
        return "No record yet."
    return (
        f"The committed record: {record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped on "
        f"{record['device']} (sources {record['sources_sha256'][:12]})."
    )


def defaults() -> str:
    """The tuned tilings."""
    rows = []
    for row in TABLE:
        archs = ", ".join(ARCHS[capability].gpu_arch for capability in row.archs)
        rows.append([archs, f"up to {row.head_dim}", f"`{row.config.name}`", row.reason])
    return _table(["architectures", "head dim", "config", "why"], rows)


def seed_tilings() -> str:
    """The seed's tilings and their names."""
    return _table(["name", "the same, spelled out"], [[f"`{n}`", f"`{c.name}`"] for n, c in SEED_CONFIGS.items()])


SECTIONS: dict[str, Callable[[], str]] = {
    section.__name__: section for section in (prefill, decode, host, gpu_tests, defaults, seed_tilings)
}


def filled(text: str) -> str:
    """The README with every section between its two markers written anew.

    Raises:
        ValueError: a section has no markers.
    """
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no place for {name}: {begin} ... {end}")
        before, after = pattern.split(text, maxsplit=1)
        text = f"{before}{begin}\n{section()}\n{end}{after}"
    return text


def _results(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _where(environment: dict[str, Any]) -> str:
    return (
        f"Measured on one {environment['device']} (driver {environment['driver']}, CUDA {environment['cuda']}, torch "
        f"{environment['torch']}, cuDNN {environment['cudnn']}, DSL {environment['nvidia-cutlass-dsl']}), "
        f"{environment['date']}."
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is out of date")
    options = parser.parse_args()
    before = README.read_text()
    after = filled(before)
    if options.check:
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
