"""Adapters of other packages; each needs its extra."""
