#!/usr/bin/env bash
# Sets up and runs the fast tests: 8 to 17 minutes on two cores, including the set-up.
# usage: bash scripts/test.sh [--all] [pytest options]     e.g. bash scripts/test.sh tests/advantages
#   --all   also the slow tests: whole runs, kills and resumes, meshes, notebooks, processes
case "${1:-}" in -h|--help) sed -n '2,4p' "$0" | sed 's/^# //;s/^#//'; exit 0;; esac
source "$(dirname "$0")/setup.sh" test
chosen=(-m "not slow")
if [ "${1:-}" = --all ]; then
  shift
  chosen=()
fi
ruff check .
mypy & types=$!  # beside the tests, as it uses one core
status=0
python -m pytest -q --durations=15 -n "${JAXRL_LLM_TEST_WORKERS:-auto}" --dist worksteal "${chosen[@]}" "$@" || status=$?
wait "$types" || { echo "mypy found errors, which stand above the tests" >&2; status=1; }
exit "$status"
