"""Speed against the peers, one module per table: ``python -m benchmarks --help``."""
