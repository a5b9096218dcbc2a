#!/usr/bin/env bash
# Sets up .venv with everything that a CPU machine needs to run and test makespan, and proves it by generating once.
# Does nothing when that has been done for these requirements. Used by `make bench` and `make test`.
set -euo pipefail
cd "$(dirname "$0")"

stamp=.venv/.makespan-ready
wanted=$(cat requirements/cpu.txt pyproject.toml setup.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

python=
for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "makespan needs Python 3.11 here (the pinned vLLM build for CPUs is tested with it), and neither python3.11," \
        "python3 nor python is one. Install Python 3.11 with its venv module and run this again." >&2
    exit 1
fi

echo "setting up .venv with $("$python" --version) (about 3 minutes and 4 GB; once)"
"$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# torch brings its own dependencies, the pinned rest comes without any: that way the CPU build and the CUDA build of
# torch both work, whichever the machine's package index gives for this version.
pip install -qq torch==2.13.0
pip install -qq --no-deps -r requirements/cpu.txt
pip install -qq --no-deps --no-build-isolation -e .

echo "checking the set-up: importing everything and generating with the embedded model"
.venv/bin/makespan doctor --generate
echo "$wanted" >"$stamp"
