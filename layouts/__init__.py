"""Layout algebra, memory model and pictures for people who study tilings (being built)."""

__cute_attn__ = True  # cute_attn.layouts makes sure that it found this package and not another of its name


def __getattr__(name: str) -> object:
    """``layouts.simulate``, imported when it is asked for: the simulator needs numpy, and the DSL where it runs it."""
    if name == "simulate":
        from layouts.simulator.simulate import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
