"""Fill, show and clear the cache of compiled kernels, inspect a kernel's machine code, and run a kernel on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from cute_attn import __version__
from cute_attn.arch import ARCHS, Arch, arch_by_name
from cute_attn.caches import PAGE_SIZE_MULTIPLE, check_cache_head_dim
from cute_attn.compiler import cache, inventory, kernel_sets, workers
from cute_attn.configs import default_config, parse_config
from cute_attn.decode_configs import default_decode_config, parse_decode_config, seed_config
from cute_attn.decode_problem import DecodeProblem
from cute_attn.options import LAYOUTS, window_widths
from cute_attn.problem import KernelSpec, PrefillProblem

if TYPE_CHECKING:
    from cute_attn.simulation.outcome import Outcome

ERROR_STATUS = 2
FAULT_STATUS = 1  # of a kernel that was simulated
KERNELS = ("prefill", "decode")
SCHEDULES = ("lockstep", "serial", "reversed", "random")  # the simulator's, which is imported when it is used


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except BrokenPipeError:  # the reader, `head` say, has seen enough; keep Python from flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        return _fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_attn",
        description=__doc__,
        epilog="To see attention run, checked and timed on this machine: python -m cute_attn.demo",
    )
    parser.add_argument("--version", action="version", version=f"cute_attn {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{build,cache,inspect,simulate}")
    _add_build(commands)
    _add_cache(commands)
    _add_inspect(commands)
    _add_simulate(commands)
    return parser


def _add_build(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    build = commands.add_parser(
        "build",
        help="compile kernels into the cache; needs no GPU",
        description="Compile kernels into the cache, or find them there. No GPU is needed. The set is the core "
        "kernels (dense, head dims 64 and 128, both dtypes, causal and not), or with --all also head dims 32, 96, 192 "
        "and 256, windows, packed sequences and the log-sum-exp, and decode's with paged and quantised caches: "
        "216 kernels an architecture. The cache is good for "
        "processors with the instruction sets of this one.",
    )
    build.add_argument(
        "--arch",
        nargs="+",
        metavar="ARCH",
        help=f"compile for these: {', '.join(arch.gpu_arch for arch in ARCHS.values())} (default: this machine's)",
    )
    build.add_argument("--all", action="store_true", help="the large set instead of the core kernels")
    build.add_argument("--jobs", type=_positive, metavar="N", help="at most N processes (default: one a core)")
    build.add_argument("--json", action="store_true", help="print the outcome of each kernel as JSON")
    build.add_argument(workers.PROTOCOL_OPTION, action="store_true", dest="from_stdin", help=argparse.SUPPRESS)
    build.set_defaults(run=_build)


def _add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "cache",
        help="show or clear the compiled kernels on disk",
        description="Show the compiled kernels on disk. A kernel is stale if another compiler, Python, processor or "
        "state of the sources made it: it is never used, and may be cleared.",
    )
    which = show.add_mutually_exclusive_group()
    which.add_argument("--clear", action="store_true", help="delete all of them")
    which.add_argument("--clear-stale", action="store_true", help="delete those that are stale")
    show.add_argument("--json", action="store_true", help="print JSON; with a deletion, of what was deleted")
    show.set_defaults(run=_cache)


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="registers, spills, shared memory and instruction counts of a kernel; needs no GPU",
        description="Compile one kernel and show what its machine code uses and does. No GPU is needed.",
    )
    _add_kernel_choice(inspect)
    inspect.add_argument("--window", action="store_true", help="bounded on both sides; decode: on the left")
    inspect.add_argument("--varlen", action="store_true", help="packed sequences (prefill)")
    inspect.add_argument("--lse", action="store_true", help="with the log-sum-exp")
    decode = _add_decode_choice(inspect)
    decode.add_argument(
        "--rows", type=_positive, metavar="N", help="heads that share a cache head x queries (default: 8)"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)


def _add_decode_choice(command: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The options that say which decode kernel, beside those of ``_add_kernel_choice``."""
    decode = command.add_argument_group("decode alone")
    decode.add_argument("--cache-dtype", choices=kernel_sets.QUANTISED_DTYPES, help="default: that of q")
    decode.add_argument("--page-size", type=int, default=0, metavar="N", help="tokens of a page (default: no pages)")
    decode.add_argument("--softcap", action="store_true")
    decode.add_argument("--sinks", action="store_true")
    return decode


def _add_kernel_choice(command: argparse.ArgumentParser) -> None:
    """The options that say which kernel, but for what each command says in its own way."""
    command.add_argument("kernel", choices=KERNELS)
    command.add_argument("--head-dim", type=_positive, required=True, metavar="D", help="of q and k")
    command.add_argument("--head-dim-v", type=_positive, metavar="D", help="of v (default: that of q and k)")
    command.add_argument("--arch", metavar="ARCH", help="for instance sm_80 (default: this machine's first)")
    command.add_argument("--dtype", choices=kernel_sets.DTYPES, default=kernel_sets.DTYPES[0])
    command.add_argument("--causal", action="store_true")
    command.add_argument(
        "--config", metavar="NAME", help="a tiling by name (default: the tuned one; decode: also seed)"
    )


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run a kernel on this CPU: its result, races and memory traffic; needs no GPU",
        description="Compile one kernel, run it on this CPU on random inputs, compare with the reference, and show "
        "what it did wrong and how it used memory. Exits with 1 if the result is wrong or anything was found.",
    )
    _add_kernel_choice(simulate)
    simulate.add_argument(
        "--window",
        type=int,
        nargs="+",
        metavar="N",
        help="keys seen left and right of a query, -1 is unbounded; decode: tokens seen, one number",
    )
    simulate.add_argument("--batch", type=_positive, metavar="N", help="default: 1; decode: 2")
    simulate.add_argument("--heads", type=_positive, metavar="N", help="of q (default: 2; decode: 8)")
    simulate.add_argument(
        "--kv-heads", type=_positive, metavar="N", help="of k and v (default: as many as of q; decode: 2)"
    )
    simulate.add_argument("--q-len", type=_positive, metavar="N", help="queries (default: 133; decode: 1)")
    simulate.add_argument(
        "--k-len",
        type=_positive,
        default=199,
        metavar="N",
        help="keys; decode: of the first sequence, later ones are a little shorter (default: 199)",
    )
    simulate.add_argument("--lse", action="store_true", help="with the log-sum-exp")
    prefill = simulate.add_argument_group("prefill alone")
    prefill.add_argument(
        "--varlen", action="store_true", help="packed sequences, each a little shorter than the one before"
    )
    prefill.add_argument("--layout", choices=LAYOUTS, help="of dense tensors (default: bhsd)")
    decode = _add_decode_choice(simulate)
    decode.add_argument("--num-splits", type=_positive, metavar="N", help="blocks that share a sequence (default: 2)")
    simulate.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0], help="in which order warps run")
    simulate.add_argument("--seed", type=int, default=0, help="of the inputs and the random schedule (default: 0)")
    simulate.add_argument("--unchecked", action="store_true", help="do not look for races, which is faster")
    simulate.add_argument("--heatmap", metavar="FILE", help="also write a picture of the memory traffic, SVG")
    form = simulate.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--listing", action="store_true", help="also print the PTX with counts in the margin")
    simulate.set_defaults(run=_simulate)


def _build(options: argparse.Namespace) -> int:
    if options.from_stdin:
        workers.serve(sys.stdin, sys.stdout)
        return 0
    kernels = kernel_sets.all_kernels if options.all else kernel_sets.core_kernels
    specs = [spec for arch in _archs(options.arch) for spec in kernels(arch)]
    with _cache_errors():
        outcomes = workers.build(specs, options.jobs)
    if options.json:
        print(json.dumps([{**asdict(outcome), "kernel": outcome.spec.name} for outcome in outcomes], indent=2))
    else:
        _print_outcomes(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else ERROR_STATUS


def _print_outcomes(outcomes: Sequence[workers.Outcome]) -> None:
    compiled = sum(outcome.status == "compiled" for outcome in outcomes)
    found = sum(outcome.status == "found" for outcome in outcomes)
    print(f"{compiled} compiled, {found} found, {len(outcomes) - compiled - found} failed, in {cache.cache_dir()}")
    for outcome in outcomes:
        if not outcome.ok:
            _fail(f"kernel {outcome.spec.name} {outcome.status}: {outcome.reason}")


def _cache(options: argparse.Namespace) -> int:
    with _cache_errors():
        kernels = inventory.cached_kernels()
        if options.clear or options.clear_stale:
            kernels = [kernel for kernel in kernels if options.clear or kernel.stale]
            inventory.delete(kernels)
    if options.json:
        rows = [
            {**asdict(kernel), "age_seconds": round(kernel.age_seconds), "path": str(kernel.path)} for kernel in kernels
        ]
        print(json.dumps({"folder": str(cache.cache_dir()), "kernels": rows}, indent=2))
    else:
        number = f"{len(kernels)} kernel{'s' * (len(kernels) != 1)}"
        size = f"{sum(kernel.size_bytes for kernel in kernels) / 2**20:.1f} MiB"
        deleted = "deleted from" if options.clear or options.clear_stale else "in"
        print(f"{number}, {size}, {deleted} {cache.cache_dir()}")
        _print_kernels(kernels)
    return 0


def _print_kernels(kernels: Sequence[inventory.CachedKernel]) -> None:
    width = max((len(kernel.kernel) for kernel in kernels), default=0)
    for kernel in kernels:
        size, age = f"{kernel.size_bytes / 1024:.0f} KiB", f"{_age(int(kernel.age_seconds))} old"
        note = "  stale" if kernel.stale else ""
        print(f"{kernel.kernel:<{width}}  {kernel.gpu_arch:<8}{size:>9}  {age:>14}{note}")


def _age(seconds: int) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = seconds // length
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{seconds} s"


def _inspect(options: argparse.Namespace) -> int:
    from cute_attn.compiler.inspect import inspect_kernel, table

    if options.kernel == "decode":
        spec = _decode_spec(options)
    else:
        _refuse(options, "--cache-dtype", "--page-size", "--rows", "--softcap", "--sinks")
        spec = _spec(
            options,
            bounded_left=options.window,
            bounded_right=options.window or options.causal,
            varlen=options.varlen,
            return_lse=options.lse,
        )
    report = inspect_kernel(spec)
    if options.json:
        print(json.dumps({**asdict(report), "instructions": report.instructions}, indent=2))
    else:
        print(table(report))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    outcome = (_simulate_decode if options.kernel == "decode" else _simulate_prefill)(options)
    if options.heatmap:
        outcome.report.heatmap(options.heatmap)
    if options.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        print(outcome)
    if options.listing:
        print(f"\n{outcome.report.listing()}")
    return 0 if outcome.ok else FAULT_STATUS


def _simulate_prefill(options: argparse.Namespace) -> Outcome:
    from cute_attn.simulation.outcome import Run
    from cute_attn.simulation.prefill import Call, simulate_prefill

    _refuse(options, "--cache-dtype", "--page-size", "--softcap", "--sinks", "--num-splits")
    window = options.window
    left, right = window_widths(options.causal, None if window is None else tuple(window))
    heads = options.heads or Call.heads
    if options.varlen and options.layout:
        raise ValueError("--layout is the order of dense tensors; with --varlen there is only one")
    sizes = options.batch or Call.batch, heads, options.kv_heads or heads, options.q_len or Call.q_len, options.k_len
    layout = options.layout or Call.layout
    spec = _spec(
        options, bounded_left=left >= 0, bounded_right=right >= 0, varlen=options.varlen, return_lse=options.lse
    )
    run = Run(options.schedule, options.seed, not options.unchecked)
    return simulate_prefill(spec, Call(*sizes, left, right, options.seed, layout), run)


def _simulate_decode(options: argparse.Namespace) -> Outcome:
    from cute_attn.decode_options import check_window
    from cute_attn.simulation.decode import DecodeCall, simulate_decode
    from cute_attn.simulation.outcome import Run

    _refuse(options, "--layout")
    window = options.window
    if window is not None and len(window) != 1:
        raise ValueError(f"--window of decode must be one number, got {len(window)}")
    given = {
        "batch": options.batch,
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "q_len": options.q_len,
        "length": options.k_len,
        "window": window and window[0],
        "num_splits": options.num_splits,
        "seed": options.seed,
    }
    call = DecodeCall(**{field: value for field, value in given.items() if value is not None})
    check_window(call.window)
    options.window, options.rows = window is not None, call.rows
    run = Run(options.schedule, options.seed, not options.unchecked)
    return simulate_decode(_decode_spec(options), call, run)


def _spec(options: argparse.Namespace, **variant: bool) -> KernelSpec:
    """The kernel that the options choose; ``variant`` holds the flags of PrefillProblem."""
    head_dim, head_dim_v = options.head_dim, options.head_dim_v or options.head_dim
    for option, value in (("--head-dim", head_dim), ("--head-dim-v", head_dim_v)):
        if value % 8 or value > 256:
            raise ValueError(f"{option} must be a multiple of 8 up to 256, got {value}")
    arch = _archs([options.arch] if options.arch else None)[0]
    problem = PrefillProblem(options.dtype, head_dim, head_dim_v, **variant)
    config = parse_config(options.config, head_dim) if options.config else default_config(arch, head_dim, head_dim_v)
    config.check_fits(arch, head_dim, head_dim_v)
    return KernelSpec(problem, config, arch)


def _decode_spec(options: argparse.Namespace) -> KernelSpec:
    """The decode kernel that the options choose."""
    _refuse(options, "--head-dim-v", "--causal", "--varlen")
    check_cache_head_dim("--head-dim", options.head_dim)
    if options.page_size % PAGE_SIZE_MULTIPLE or options.page_size < 0:
        raise ValueError(f"--page-size must be a multiple of {PAGE_SIZE_MULTIPLE}, got {options.page_size}")
    arch = _archs([options.arch] if options.arch else None)[0]
    problem = DecodeProblem(
        options.dtype,
        options.cache_dtype or options.dtype,
        options.head_dim,
        options.page_size,
        bounded_left=options.window,
        softcap=options.softcap,
        sinks=options.sinks,
        return_lse=options.lse,
    )
    rows = options.rows or kernel_sets.DECODE_ROWS
    if options.config == "seed":
        return KernelSpec(problem, seed_config(arch, problem, rows), arch)
    named = parse_decode_config(options.config) if options.config else default_decode_config(arch, problem, rows)
    named.check_fits(arch, problem)
    return KernelSpec(problem, named, arch)


def _refuse(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError if an option is given that this kernel does not have."""
    for name in names:
        if getattr(options, name.removeprefix("--").replace("-", "_")):
            raise ValueError(f"{name} is no option of {options.kernel}")


def _archs(names: Sequence[str] | None) -> list[Arch]:
    if names:
        return list(dict.fromkeys(arch_by_name(name) for name in names))
    from cute_attn.loading import machine_archs

    archs = machine_archs()
    if not archs:
        raise ValueError("this machine shows no supported CUDA device: say which architecture with --arch")
    return archs


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    """Errors of the cache's folder, with what to do about them."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(cache.unwritable(error)) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _fail(message: str) -> int:
    print(f"cute_attn: {' '.join(message.split())}", file=sys.stderr)
    return ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main())
