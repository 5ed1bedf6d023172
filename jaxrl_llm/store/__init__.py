"""What a run keeps on disk: its folder and lock, checkpoints, batches in flight, the code that it was started with."""
