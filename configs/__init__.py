"""Config files, given by path (`--config=configs/arithmetic.py`) or, once installed, by name (`--config=arithmetic`)."""
