"""Facts about GPU architectures: what the config table and the compiler need to know, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One compute capability.

    Attributes:
        capability: major * 10 + minor, for instance 90.
        gpu_arch: the name that the compiler takes, for instance "sm_90a".
        smem_bytes: shared memory that one block may use, in bytes (CUDA programming guide, table of technical
            specifications per compute capability).
    """

    capability: int
    gpu_arch: str
    smem_bytes: int


KIB = 1024

ARCHS: dict[int, Arch] = {
    arch.capability: arch
    for arch in (
        Arch(80, "sm_80", 163 * KIB),
        Arch(86, "sm_86", 99 * KIB),
        Arch(87, "sm_87", 163 * KIB),
        Arch(89, "sm_89", 99 * KIB),
        Arch(90, "sm_90a", 227 * KIB),
        Arch(100, "sm_100a", 227 * KIB),
        Arch(103, "sm_103a", 227 * KIB),
        Arch(110, "sm_110a", 227 * KIB),
        Arch(120, "sm_120a", 99 * KIB),
        Arch(121, "sm_121a", 99 * KIB),
    )
}


def arch_of(capability: int | tuple[int, int]) -> Arch:
    """The architecture of a compute capability, 90 or (9, 0).

    Raises:
        ValueError: the capability is not one that the kernels compile for.
    """
    number = capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability
    if number not in ARCHS:
        raise ValueError(f"compute capability {number / 10:.1f} is not supported; supported: {_supported()}")
    return ARCHS[number]


def arch_by_name(name: str) -> Arch:
    """The architecture of a name: "sm_90a", "sm_90" or "90".

    Raises:
        ValueError: no supported architecture has that name.
    """
    digits = name.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) not in ARCHS:
        raise ValueError(f"arch {name!r} is not supported; supported: {_supported()}")
    return ARCHS[int(digits)]


def _supported() -> str:
    return ", ".join(arch.gpu_arch for arch in ARCHS.values())
