"""Attention kernels in NVIDIA's CuTe Python DSL, as PyTorch operators.

Importing this registers ``torch.ops.cute_attn.*`` and, on a machine with a supported GPU, compiles the kernels that
nearly every program calls, once (see ``cute_attn.loading``).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from cute_attn import loading, reference
from cute_attn.api import attention, warmup
from cute_attn.caches import ContiguousCache, PagedCache
from cute_attn.configs import SEED_CONFIGS, PrefillConfig
from cute_attn.decode_api import decode, warmup_decode
from cute_attn.decode_configs import RolesConfig, StreamsConfig
from cute_attn.merging import merge

__version__ = "0.1.0"
__all__ = [
    "SEED_CONFIGS",
    "ContiguousCache",
    "PagedCache",
    "PrefillConfig",
    "RolesConfig",
    "StreamsConfig",
    "__version__",
    "attention",
    "decode",
    "layouts",
    "merge",
    "reference",
    "warmup",
    "warmup_decode",
]


if TYPE_CHECKING:
    import layouts
else:  # a type checker would take every misspelt name for a module

    def __getattr__(name: str) -> ModuleType:
        if name == "layouts":
            return _layouts()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _layouts() -> ModuleType:
    """The top-level package ``layouts`` that comes with this one.

    Raises:
        ImportError: another package of that name is found first.
    """
    import layouts

    if not getattr(layouts, "__cute_attn__", False):
        raise ImportError(
            f"cute_attn.layouts is the package 'layouts' that is installed with cute_attn, but {layouts.__file__} is "
            "imported under that name: remove or rename it, or put cute_attn's folder before it in sys.path"
        )
    return layouts


loading.compile_core_kernels()
