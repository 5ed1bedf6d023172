#!/usr/bin/env bash
# Makes .venv beside setup.py and installs jaxrl_llm into it; the other scripts source it.
# usage: bash scripts/setup.sh [EXTRAS]     e.g. bash scripts/setup.sh tasks,gpu      then: source .venv/bin/activate
# PYTHON picks the interpreter (default: python3); JAXRL_LLM_VENV the folder of the environment (default: .venv).
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,4p' "${BASH_SOURCE[0]}" | sed 's/^# //'; exit 0;; esac
extras="${1:+[$1]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "jaxrl_llm needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1 || echo missing)." \
       "Set PYTHON=/path/to/python3.11" >&2
  exit 1
fi
venv="${JAXRL_LLM_VENV:-.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
if [ ! -x "$venv/bin/python" ]; then
  echo "Making $venv ..."
  [ -e "$venv" ] && own="" || own=1
  if ! "$python" -m venv "$venv"; then
    [ -z "$own" ] || rm -rf "$venv"
    echo "could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
  fi
fi
# Modules are compiled when they are imported: most never are (--no-compile).
# Skips the installation if setup.py is unchanged since the last installation of these extras.
stamp="$venv/installed$extras-$(cksum < setup.py | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
  echo "Installing jaxrl_llm$extras and its dependencies (a minute or two) ..."
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -e ".$extras" 2> "$venv/pip.log" || {
    cat "$venv/pip.log" >&2
    exit 1
  }
  case "$(uname -s) $extras" in
    *gpu*|*tpu*) ;;
    Linux*) PATH="$venv/bin:$PATH" bash scripts/get_jemalloc.sh ||
      echo "Goes on without jemalloc: a step on CPUs takes up to a third longer." >&2 ;;
  esac
  touch "$stamp"
  command -v bwrap > /dev/null || echo "Optional: bubblewrap, the sandbox of the reward 'code'" \
    "(Debian, Ubuntu: apt-get install bubblewrap); 'python -m jaxrl_llm.sandbox' says what works without it." >&2
fi
export PATH="$venv/bin:$PATH"
[ -z "${PYTHON:-}" ] || export PYTHON="$venv/bin/python"  # keep_training.sh reads it too
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  echo "jaxrl_llm$extras is installed; now: source $venv/bin/activate"
fi
