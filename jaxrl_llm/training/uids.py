"""Every trajectory of a run has a number of its own, from which its random numbers are made (`generation.row_keys`)."""
import dataclasses

import numpy as np


@dataclasses.dataclass
class Uids:
    """Hands out the numbers of trajectories in order, each once; `next`, the first one left, is saved with every checkpoint."""

    next: int = 0

    def take(self, rows: int, group: int) -> np.ndarray:
        """i64[rows, group]"""
        first, self.next = self.next, self.next + rows * group
        return np.arange(first, self.next, dtype=np.int64).reshape(rows, group)
