#!/usr/bin/env bash
# Put a rendered matrix into the job summary, with what changed against the committed evidence.
# usage: ci/publish.sh OUT_DIR
set -uo pipefail
out=$1
summary=${GITHUB_STEP_SUMMARY:-/dev/stdout}
if [ -f "$out/MATRIX.md" ]; then
  cat "$out/MATRIX.md" >> "$summary"
else
  echo "No matrix was rendered." >> "$summary"
fi
attnmatrix=$(command -v attnmatrix || echo .venv/bin/attnmatrix)
if ls matrix/evidence/*.jsonl > /dev/null 2>&1 && ls "$out"/evidence/*.jsonl > /dev/null 2>&1; then
  { echo; echo '## Changes against the committed evidence'; echo '```'; "$attnmatrix" compare matrix/evidence "$out/evidence" 2>&1 | tail -n 60; echo '```'; } >> "$summary"
fi
