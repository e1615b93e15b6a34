"""The committed record of the GPU tests: it is of these very sources, and nothing failed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.gpu import record

ROOT = Path(__file__).parents[1]


def test_hash_is_as_documented(tmp_path: Path) -> None:
    for path, content in (("cute_attn/b.py", b"B"), ("cute_attn/a/c.py", b"C"), ("tests/gpu/d.py", b"D")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    (tmp_path / "cute_attn" / "notes.txt").write_text("not Python")
    expected = hashlib.sha256(b"cute_attn/a/c.py\0Ccute_attn/b.py\0Btests/gpu/d.py\0D").hexdigest()
    assert record.sources_sha256(tmp_path) == expected


def test_summary_counts_what_pytest_reports(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1" time="2.5">'
        '<testcase><skipped message="one GPU"/></testcase></testsuite></testsuites>'
    )
    expected = {"passed": 2, "failed": 2, "skipped": 1, "skip_reasons": {"one GPU": 1}, "seconds": 2.5}
    assert record.summary(report) == expected


@pytest.fixture
def committed() -> dict[str, object]:
    assert record.RECORD.exists(), "run python -m tests.gpu.record on a machine with a GPU"
    content: dict[str, object] = json.loads(record.RECORD.read_text())
    return content


def test_record_is_of_these_sources(committed: dict[str, object]) -> None:
    assert committed["sources_sha256"] == record.sources_sha256(ROOT), "run python -m tests.gpu.record again"


def test_record_has_no_failure(committed: dict[str, object]) -> None:
    assert committed["failed"] == 0
    assert committed["device"]
    passed = committed["passed"]
    assert isinstance(passed, int)
    assert passed > 500


def test_host_times_that_were_measured_are_within_their_bound() -> None:
    """Of a call that was not captured, on the machine of the committed figures."""
    times = json.loads((ROOT / "benchmarks/results/host.json").read_text())["host"]
    ours = {name: time for name, time in times.items() if name.startswith("cute_attn")}
    assert len(ours) >= 8
    assert max(ours.values()) <= 15.0
