#!/usr/bin/env bash
# Tests the environment adapters whose packages conflict, each in its own virtual environment; recipes of the cookbook too;
# gymnax, which holds jax back.
# usage: bash scripts/test_adapters.sh [openenv|verifiers|tinker-cookbook|gymnax ...]     default: all four
# JAXRL_LLM_ADAPTERS: the folder of these environments (default: ~/.cache/jaxrl_llm/adapters); it is kept. PYTHON: the interpreter.
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,5p' "$0" | sed 's/^# //'; exit 0;; esac
cd "$(dirname "$0")/.."
folder="${JAXRL_LLM_ADAPTERS:-$HOME/.cache/jaxrl_llm/adapters}"
[ $# -gt 0 ] || set -- openenv verifiers tinker-cookbook gymnax
failed=()
for extra in "$@"; do
  tests=(tests/*/test_"${extra//-/_}"_*.py tests/integration/test_adapter_runs.py)
  [ "$extra" != gymnax ] || tests=(tests/environments/test_compiled.py tests/integration/test_compiled_games.py)
  [ -e "${tests[0]}" ] || { echo "no tests of '$extra'; openenv, verifiers, tinker-cookbook or gymnax" >&2; exit 1; }
  set +e  # continues with the others after a failure
  ( set -e
    also=""
    [ "$extra" != tinker-cookbook ] || also=",tinker"  # recipes train on the server
    JAXRL_LLM_VENV="$folder/$extra" source scripts/setup.sh "$extra$also"
    python -m pip install --quiet --disable-pip-version-check pytest pytest-rerunfailures hypothesis
    echo "--- $extra $(python -c "import importlib.metadata as m; print(m.version('$extra'))")"
    python -m pytest -q -p no:cacheprovider "${tests[@]}" )
  [ $? -eq 0 ] || failed+=("$extra")
  set -e
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
