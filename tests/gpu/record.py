"""Runs the GPU tests and keeps what came out: ``python -m tests.gpu.record``."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.report import RESULTS, environment

ROOT = Path(__file__).parents[2]
RECORD = RESULTS / "gpu_tests.json"
SOURCE_FOLDERS = ("cute_attn", "tests/gpu")


def sources_sha256(root: Path = ROOT) -> str:
    """SHA-256 over the sources, in the order of their paths: for each its posix path, a zero byte and its bytes."""
    digest = hashlib.sha256()
    paths = sorted(
        path.relative_to(root).as_posix() for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py")
    )
    for path in paths:
        digest.update(path.encode() + b"\0" + (root / path).read_bytes())
    return digest.hexdigest()


def run_tests(junit: Path, only: str | None) -> int:
    """Run pytest in a process of its own, as a hanging kernel ends that process; returns its exit status.

    Each test's name is printed, unbuffered, before it runs: the last one is the one that hung.
    """
    options = [f"--junitxml={junit}", "-v", "-p", "no:cacheprovider"]
    command = [sys.executable, "-u", "-m", "pytest", "tests/gpu", *options]
    return subprocess.run(command + (["-k", only] if only else []), cwd=ROOT, check=False).returncode


def summary(junit: Path) -> dict[str, Any]:
    """Counts, seconds, what failed, and why tests were skipped, from pytest's report."""
    suite = next(ElementTree.parse(junit).iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    skips = Counter(skip.get("message", "") for skip in suite.iter("skipped"))
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "skip_reasons": dict(skips),
        "seconds": round(float(suite.get("time", 0)), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.record", description=__doc__)
    parser.add_argument("--only", metavar="EXPRESSION", help="run these tests (pytest -k) and write no record")
    parser.add_argument("--junit", type=Path, metavar="PATH", help="keep pytest's report here")
    parser.add_argument("--output", type=Path, default=RECORD, metavar="PATH", help="the record (default: %(default)s)")
    arguments = parser.parse_args()
    sources = sources_sha256()
    with tempfile.TemporaryDirectory() as folder:
        junit = (arguments.junit or Path(folder) / "junit.xml").absolute()
        junit.unlink(missing_ok=True)
        status = run_tests(junit, arguments.only)
        if not junit.exists():
            print(f"pytest ended with status {status} and without a report: no record is written", file=sys.stderr)
            return status or 1
        result = summary(junit)
    print(json.dumps(result, indent=1))
    if arguments.only:
        return status
    if result["passed"] == 0:
        print("no test ran: no record is written", file=sys.stderr)
        return status or 1
    record = {**environment(), **result, "sources_sha256": sources}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {arguments.output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
