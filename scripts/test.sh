#!/usr/bin/env bash
# Sets up and runs the tests.
# usage: bash scripts/test.sh [pytest options]      e.g. bash scripts/test.sh -m "not slow" tests/advantages
case "${1:-}" in -h|--help) sed -n '2,3p' "$0" | sed 's/^# //'; exit 0;; esac
source "$(dirname "$0")/setup.sh" test
ruff check .
mypy
exec python -m pytest -q --durations=15 -n "${JAXRL_LLM_TEST_WORKERS:-auto}" --dist worksteal "$@"
