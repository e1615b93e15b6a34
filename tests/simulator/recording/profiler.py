"""Nsight Compute's counters of a program's kernels, through its command line."""

from __future__ import annotations

import csv
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Counters = dict[str, dict[str, float]]  # of each kernel, the value of each metric


@dataclass(frozen=True)
class Profiler:
    """Attributes:
    command: ncu, or where it is.
    timeout: of each run, in seconds.
    """

    command: str = "ncu"
    timeout: float = 120

    def version(self) -> str:
        return "".join(re.findall(r"Version (\S+)", self._output("--version"))[:1])

    def metrics(self) -> list[str]:
        """Every counter of the GPU, without ".sum"; empty if ncu does not say."""
        return re.findall(r"^(\w+__\w+)\s", self._output("--query-metrics"), re.MULTILINE)

    def choose(self, patterns: Iterable[str]) -> list[str]:
        """The metrics that match any of the regular expressions as a whole; one that none matches is taken as a name.

        Counters are given with ".sum". Metrics of the source view, such as memory_l1_wavefronts_shared, have no "__"
        and are sums already.
        """
        known = self.metrics()
        chosen = []
        for pattern in patterns:
            chosen += [name for name in known if re.fullmatch(pattern, name)] or [pattern]
        return [f"{name}.sum" if "__" in name else name for name in dict.fromkeys(chosen)]

    def _output(self, option: str) -> str:
        return subprocess.run([self.command, option], capture_output=True, text=True, timeout=self.timeout).stdout

    def count(
        self, metrics: Iterable[str], program: Sequence[str], by: str = "Kernel Name", kernels: str = ""
    ) -> Counters:
        """Run a program once.

        Args:
            metrics: with ".sum".
            program: the command.
            by: what names kernels, as in ``read_csv``.
            kernels: a regular expression: count only kernels with such a name.

        Raises:
            RuntimeError: there are no counters; the message has what ncu printed.
        """
        command = [self.command, "--csv", "--clock-control", "none", "--print-units", "base"]
        command += ["--kernel-name", f"regex:{kernels}"] if kernels else []
        command += ["--metrics", ",".join(metrics), *program]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=self.timeout)
            return read_csv(done.stdout.splitlines(True), by)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(str(error)) from error
        except ValueError as error:
            raise RuntimeError(f"ncu ended with {done.returncode}: {error}\n{done.stderr[-2000:]}") from error


def patches_code(metric: str) -> bool:
    """ncu puts instructions of its own into the kernel for such a metric."""
    return "__sass_" in metric or "__" not in metric


def count_in_parts(count: Callable[[Sequence[str]], Counters], metrics: Sequence[str]) -> Counters:
    """Counters of all metrics that can be had: if none come, those of each half alone, and so on.

    One unknown metric costs all others of its run their values.
    """
    started = time.perf_counter()
    try:
        found = count(metrics)
    except RuntimeError as error:
        if len(metrics) == 1:
            print(f"FAILED {metrics[0]}: {error}", flush=True)
            return {}
        middle = len(metrics) // 2
        return merged(count_in_parts(count, metrics[:middle]), count_in_parts(count, metrics[middle:]))
    print(f"{len(found)} kernels, {len(metrics)} metrics in {time.perf_counter() - started:.1f} s", flush=True)
    return found


def merged(*parts: Counters) -> Counters:
    """Kernels with the metrics of all parts; a later value of a metric replaces an earlier one."""
    result: Counters = {}
    for part in parts:
        for name, values in part.items():
            result[name] = dict(sorted({**result.get(name, {}), **values}.items()))
    return result


def read_csv(lines: Iterable[str], by: str = "Kernel Name") -> Counters:
    """The output of ``ncu --csv``, a row for each metric or for each kernel.

    Args:
        by: the column that names kernels: "Kernel Name", or "ID" where one kernel is launched several times.

    Raises:
        ValueError: it holds no table.
    """
    kept = list(lines)
    start = next((i for i, line in enumerate(kept) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table in ncu's output:\n" + "".join(kept)[-2000:])
    kernels: Counters = {}
    for row in csv.DictReader(kept[start:]):
        name = (row.get(by) or "").split("(")[0]
        if not name:
            continue  # the row of units
        if "Metric Name" in row:
            cells = {row["Metric Name"]: row["Metric Value"]}
        else:
            cells = {column: value for column, value in row.items() if "__" in (column or "")}
        numbers = {metric: _number(value) for metric, value in cells.items()}
        kernels.setdefault(name, {}).update({metric: value for metric, value in numbers.items() if value is not None})
    return kernels


def _number(text: str | None) -> float | None:
    """None for what ncu calls n/a."""
    digits = (text or "").replace(",", "")
    return float(digits) if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", digits) else None
