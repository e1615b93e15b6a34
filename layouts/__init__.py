"""Layout algebra, memory model and pictures for people who study tilings (being built)."""

__cute_attn__ = True  # cute_attn.layouts makes sure that it found this package and not another of its name
