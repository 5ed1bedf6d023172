"""A run from its first step to its last, and what it writes for people: metrics, figures, pages, reports."""
