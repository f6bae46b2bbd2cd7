#!/usr/bin/env bash
# Collects what a GPU machine without a network lacks, as wheels for its Python, into .wheels/ (4 MB, ignored by git):
# pydantic, for calibrations; peft and what it imports, for adapters; tomli-w, with which a run of the trainer writes.
# tests/test_gpu_quarter.py rehearses with just these. MORE: others, bitsandbytes==0.50.2 say, 43 MB, for its optimizer's row.
#   [MORE="NAME==VERSION ..."] benchmarks/gpu/wheels.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.wheels} python=${PYTHON:-python3}
platforms=()
for glibc in 2_28 2_27 2_24 2_17 2_12; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
mkdir -p "$folder"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" \
    pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0 \
    peft==0.21.2 accelerate==1.15.0 psutil==7.2.2 tomli-w==1.2.0 ${MORE:-}
ls "$folder"
