"""The one form of message that a wrong argument gets."""

from __future__ import annotations


def argument_error(argument: str, what: str, value: object, allowed: str) -> ValueError:
    """Names the argument, what about it is wrong, what that was, and what is allowed."""
    return ValueError(f"{argument}: {what} is {value}; allowed: {allowed}")
