"""Checks of verifiers, environments and runs: what they pay to answers and policies that deserve nothing, and replays."""
