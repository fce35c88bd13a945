#!/usr/bin/env bash
# Make .venv ready: find a Python that works, create the environment, install jlaqat into it with pinned versions.
#
#   scripts/setup.sh          what `make demo` needs
#   scripts/setup.sh test     what `make test` needs besides (torch, triton, fla-core, test tools: about 5 GB)
#   scripts/setup.sh dev      the same and pre-commit
#
# JLAQAT_PYTHON=/path/to/python3.12 names the interpreter. A call that finds everything done returns at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:-}
venv=$PWD/.venv
# What is installed depends on these files alone; their hash in the stamp says whether an earlier call did it.
stamp=$venv/.installed-${extra:-base}
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)

usable() {  # usable PYTHON: it starts, is 3.12 or newer, and can make an environment
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {  # print the first candidate that really runs (a name on PATH may be a shim that fails)
  local candidate
  if [ -n "${JLAQAT_PYTHON:-}" ]; then
    usable "$JLAQAT_PYTHON" && { echo "$JLAQAT_PYTHON"; return; }
    echo "jlaqat: JLAQAT_PYTHON=$JLAQAT_PYTHON does not run, is older than 3.12, or lacks venv/ensurepip." >&2
    return 1
  fi
  for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python /usr/local/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9]; do
    usable "$candidate" && { command -v "$candidate"; return; }
  done
  if command -v uv >/dev/null; then
    candidate=$(uv python find '>=3.12' 2>/dev/null || { uv python install 3.12 >&2 && uv python find 3.12; }) || candidate=
    [ -n "$candidate" ] && usable "$candidate" && { echo "$candidate"; return; }
  fi
  cat >&2 <<MSG
jlaqat: no usable Python 3.12 or newer was found (tried PATH, pyenv versions and uv).
Install one, for example:  apt-get install python3.12 python3.12-venv  |  pyenv install 3.12  |  pip install uv
or name it:                JLAQAT_PYTHON=/path/to/python3.12 make ${MAKECMDGOALS:-demo}
MSG
  return 1
}

[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null && exit 0

if ! usable "$venv/bin/python"; then
  python=$(find_python) || exit 1
  echo "jlaqat: making .venv with $("$python" --version) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
echo "jlaqat: installing${extra:+ (with the \"$extra\" extra)}, versions pinned by constraints.txt; log in .venv/install.log"
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt "$@"
}
# The tests lower for CUDA without a GPU, which asks for jax's CUDA plugin (8 MB) but not for what that asks for in turn:
# without a GPU those would only fail to start, with a traceback at every import.
if ! { install -e ".${extra:+[$extra]}" &&
  { [ -z "$extra" ] || [ "$(uname -s)" != Linux ] || install --no-deps jax-cuda13-plugin; }; } \
  >"$venv/install.log" 2>&1; then
  grep -v 'is ignored' "$venv/install.log" | tail -n 30 >&2
  echo "jlaqat: the installation failed (above: the end of .venv/install.log). Mend it and call again; what is installed stays." >&2
  exit 1
fi
echo "$wanted" >"$stamp"
