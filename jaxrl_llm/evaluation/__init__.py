"""Measuring a policy."""
