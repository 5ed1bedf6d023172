"""What a run will need, compute and send on devices that need not be there."""
