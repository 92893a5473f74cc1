#!/bin/sh
# Runs the conformance set under compute-sanitizer's tools, side by side, and prints their summaries.
# usage: benchmarks/sanitize.sh FOLDER [COMMAND...]; the logs go to the folder.
set -u
out=${1:?usage: sanitize.sh FOLDER [COMMAND...]}
shift
[ $# -gt 0 ] || set -- python3 benchmarks/conformance.py --backend cuda
mkdir -p "$out"
for tool in memcheck racecheck initcheck; do
  # Only this package's kernels; MLX's own fills and copies are not in question.
  compute-sanitizer --tool $tool --kernel-name kernel_substring=custom_kernel --error-exitcode 9 \
    --log-file "$out/$tool.txt" "$@" > "$out/$tool.run.txt" 2>&1 &
  eval "pid_$tool=$!"
done
failed=0
for tool in memcheck racecheck initcheck; do
  eval "wait \$pid_$tool" || failed=1
  echo "$tool: $(tail -n 1 "$out/$tool.txt") [$(grep -a 'wrong$' "$out/$tool.run.txt")]"
done
exit $failed
