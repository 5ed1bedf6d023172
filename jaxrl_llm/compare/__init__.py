"""Which method is better, by how much, at equal compute: plan the runs, launch them, count what they spent, report."""
