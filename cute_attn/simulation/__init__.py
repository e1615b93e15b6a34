"""Kernels run on this CPU by ``layouts.simulate``: their results against the reference, their faults and traffic."""
