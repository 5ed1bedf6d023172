"""From finished rollouts to new weights: measurements, advantages, updates, and the schedules that order them."""
