"""Compares methods at equal compute: plans the runs, launches them, counts what they spent, and reports."""
