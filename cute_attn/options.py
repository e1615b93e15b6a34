"""Attention's options: from the user's terms to those of the ops, and what each may be."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cute_attn.configs import PrefillConfig
from cute_attn.errors import argument_error

LAYOUTS = ("bhsd", "bshd")
UNBOUNDED = -1  # a window width that hides nothing
MAX_LENGTH = 2**30  # of a sequence, or of all packed sequences together: what the kernels' 32-bit arithmetic bears

Window = tuple[int | None, int | None]


class Options(NamedTuple):
    """What an op takes after its tensors, in order; ``OPTIONS_SCHEMA`` says it to torch.

    An op leaves out trailing options that have their default, each of which costs host time, so those that vary most
    come first.

    Attributes:
        window_right: a query sees at most this many keys right of its own; negative is unbounded, causal is 0.
        window_left: the same on the left.
        scale: softmax scale; None for 1 / sqrt(head_dim).
        layout: one of ``LAYOUTS``.
        config: ``PrefillConfig.name`` or the name of a seed tiling; None for the tuned default.
        cu_seqlens_q: int32 (batch + 1,), where each sequence's queries start and end; None without varlen.
        cu_seqlens_k: the same of keys.
    """

    window_right: int = UNBOUNDED
    window_left: int = UNBOUNDED
    scale: float | None = None
    layout: str = "bhsd"
    config: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Sequences follow each other in (total, heads, head_dim) tensors."""
        return self.cu_seqlens_q is not None


NUM_PLAIN_OPTIONS = Options._fields.index("cu_seqlens_q")  # those that are no tensors come before
OPTIONS_SCHEMA = (
    'SymInt window_right=-1, SymInt window_left=-1, float? scale=None, str layout="bhsd", str? config=None, '
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None"
)


def window_widths(causal: bool, window: Window | None) -> tuple[int, int]:
    """(left, right) widths of the keys that a query sees; ``UNBOUNDED`` where nothing is hidden.

    Raises:
        ValueError: ``causal`` is not a bool, or ``window`` not two widths.
    """
    if causal is not True and causal is not False:
        check_flag("causal", causal)
    if window is None:
        return UNBOUNDED, (0 if causal else UNBOUNDED)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise argument_error("window", "it", repr(window), "None or (left, right)")
    left, right = _width(window, 0), _width(window, 1)
    return left, (0 if causal else right)


def _width(window: Window, side: int) -> int:
    width = window[side]
    if width is None:
        return UNBOUNDED
    if not isinstance(width, int) or isinstance(width, bool) or width < UNBOUNDED:
        name = ("left", "right")[side]
        raise argument_error("window", f"its {name} width", repr(width), "None or -1 (unbounded), or an int from 0")
    return min(width, MAX_LENGTH)


def check_flag(argument: str, value: bool) -> None:
    """Raises ValueError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise argument_error(argument, "it", repr(value), "True or False")


def check_layout(layout: str) -> None:
    """Raises ValueError unless ``layout`` is one of ``LAYOUTS``."""
    if layout not in LAYOUTS:
        raise argument_error("layout", "it", repr(layout), " or ".join(map(repr, LAYOUTS)))


def check_scale(scale: float) -> None:
    """Raises ValueError unless ``scale`` is a finite number."""
    if not isinstance(scale, (float, int)) or isinstance(scale, bool):
        raise argument_error("scale", "its type", type(scale).__name__, "None, or a finite float")
    # scale x log2(e) must be finite in float32; this also refuses NaN. The bounds are literals because torch.compile
    # takes a float constant of a module for an input that may change.
    if not -1e38 <= scale <= 1e38:
        raise argument_error("scale", "it", scale, "None, or a finite float, at most 1e38 in size")


def check_length(argument: str, value: int) -> None:
    """Raises ValueError unless ``value`` is an int from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise argument_error(argument, "it", repr(value), "None, or an int from 0")


def config_name(config: PrefillConfig | str | None) -> str | None:
    """The config as the ops take it: its name.

    Raises:
        ValueError: ``config`` is of another type.
    """
    if config is None or isinstance(config, str):
        return config
    if isinstance(config, PrefillConfig):
        return config.name
    raise argument_error("config", "its type", type(config).__name__, "None, a PrefillConfig, or a config's name")
