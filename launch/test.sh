#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest (--slow for all of them, -k NAME for some).
#
# Two processes share the files: compiling one program keeps one core busy.
# Tests that read extra data find it through SPECJAX_DATA and say so where they skip.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

prepare ""
install_once torch 'torch==2.13.0' # one version, first: left to choose, pip may take a CUDA build of several GB
install_once tests --editable '.[test]'
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest --numprocesses=2 --dist=loadfile "$@"
