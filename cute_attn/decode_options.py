"""Decode's options: from the user's terms to those of the ops, and what each may be."""

from __future__ import annotations

from typing import NamedTuple

from torch import SymInt, Tensor

from cute_attn.decode_configs import DecodeConfig
from cute_attn.errors import argument_error
from cute_attn.options import MAX_LENGTH

NO_WINDOW = -1
NO_SOFTCAP = 0.0
UNSET = 0  # of num_splits and split_size
MAX_SPLITS = 65535  # what a grid's second and third dimension bear


class DecodeOptions(NamedTuple):
    """What decode's ops take after the cache, in order; ``DECODE_OPTIONS_SCHEMA`` says it to torch.

    Attributes:
        window: tokens that a query sees, its own counted; -1 for all.
        scale: softmax scale; None for 1 / sqrt(head_dim).
        softcap: scores are softcap * tanh(score / softcap); 0 for none.
        sinks: float32 (heads,), a logit a head that takes weight and has no value.
        num_splits: blocks that share a sequence; 0 for the heuristic's choice.
        split_size: tokens of such a block instead; 0 where ``num_splits`` decides.
        config: ``DecodeConfig.name``; None for the tuned default.
    """

    window: int = NO_WINDOW
    scale: float | None = None
    softcap: float = NO_SOFTCAP
    sinks: Tensor | None = None
    num_splits: int = UNSET
    split_size: int = UNSET
    config: str | None = None


DECODE_OPTIONS_SCHEMA = (
    "SymInt window=-1, float? scale=None, float softcap=0., Tensor? sinks=None, SymInt num_splits=0, "
    "SymInt split_size=0, str? config=None"
)


def check_window(window: int | None) -> None:
    """Raises ValueError unless ``window`` is None, -1 or an int from 1."""
    if window is None or (_is_int(window) and (window == NO_WINDOW or window >= 1)):
        return
    raise argument_error("window", "it", repr(window), "None or -1 (all tokens), or an int from 1, own token counted")


def window_tokens(window: int | None) -> int:
    """The window as the ops take it.

    Raises:
        ValueError: it is none.
    """
    check_window(window)
    return NO_WINDOW if window is None else min(window, MAX_LENGTH)


def check_softcap(softcap: float | None) -> None:
    """Raises ValueError unless ``softcap`` is None, 0 or a positive number."""
    if softcap is None:
        return
    if not isinstance(softcap, (float, int)) or isinstance(softcap, bool):
        raise argument_error("softcap", "its type", type(softcap).__name__, "None, or a float from 0")
    # Literals, because torch.compile takes a float constant of a module for an input that may change.
    if not (softcap == 0 or 1e-6 <= softcap <= 1e6):
        raise argument_error("softcap", "it", softcap, "None or 0 (no cap), or from 1e-6 to 1e6")


def check_splits(num_splits: int | None, split_size: int | None) -> None:
    """Raises ValueError unless at most one of the two is given, as an int from 1."""
    if num_splits is not None:
        if split_size is not None:
            raise argument_error("split_size", "it", repr(split_size), "None, as num_splits is given")
        _check_positive("num_splits", num_splits)
    elif split_size is not None:
        _check_positive("split_size", split_size)


def decode_config_name(config: DecodeConfig | str | None) -> str | None:
    """The config as the ops take it: its name.

    Raises:
        ValueError: ``config`` is of another type.
    """
    if config is None or isinstance(config, str):
        return config
    if isinstance(config, DecodeConfig):
        return config.name
    raise argument_error("config", "its type", type(config).__name__, "None, a StreamsConfig, a RolesConfig, or a name")


def _check_positive(argument: str, value: int) -> None:
    if not _is_int(value) or value < 1:
        raise argument_error(argument, "it", repr(value), "None, or an int from 1")


def _is_int(value: object) -> bool:
    """An int, or what stands for one in a fake tensor's shape and so in the ops' checks."""
    return isinstance(value, (int, SymInt)) and not isinstance(value, bool)
