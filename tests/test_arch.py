"""Names and numbers of architectures."""

from __future__ import annotations

import pytest

from cute_attn.arch import ARCHS, Arch, arch_by_name, arch_of


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.gpu_arch)
def test_found_by_every_spelling(arch: Arch) -> None:
    number = str(arch.capability)
    spellings = {arch.gpu_arch, f"sm_{number}", number}
    assert {arch_by_name(name) for name in spellings} == {arch}
    assert arch_of(arch.capability) is arch
    assert arch_of(divmod(arch.capability, 10)) is arch


@pytest.mark.parametrize("name", ["", "sm_", "sm_75", "sm_9", "hopper", "sm_90x"])
def test_unsupported_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"arch {name!r} is not supported; supported: sm_80, sm_86"):
        arch_by_name(name)


@pytest.mark.parametrize("capability", [75, (7, 5), (9, 9), 0])
def test_unsupported_capability(capability: int | tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"compute capability \d\.\d is not supported; supported: sm_80, sm_86"):
        arch_of(capability)
