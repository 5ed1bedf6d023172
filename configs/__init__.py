"""Config files: `--config` takes a path (`--config=configs/arithmetic.py`) or a name (`--config=arithmetic`)."""
