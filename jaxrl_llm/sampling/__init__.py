"""From problems to finished rollouts: groups of completions, trajectories in environments, texts and rewards."""
