#!/bin/sh
# Runs a command, by default the conformance set, under compute-sanitizer's tools, side by side.
# usage: benchmarks/sanitize.sh FOLDER [COMMAND...]; the logs go to the folder.
set -u
out=${1:?usage: sanitize.sh FOLDER [COMMAND...]}
shift
[ $# -gt 0 ] || set -- python3 benchmarks/conformance.py --backend cuda
mkdir -p "$out"
export MLX_USE_CUDA_GRAPHS=0
for tool in memcheck racecheck synccheck initcheck; do
  # initcheck has to see MLX's own kernels fill the inputs; the others look at ours alone.
  only="--kernel-name kernel_substring=custom_kernel"
  [ $tool = initcheck ] && only=
  compute-sanitizer --tool $tool $only --error-exitcode 9 --print-limit 10000 --log-file "$out/$tool.txt" "$@" \
    > "$out/$tool.run.txt" 2>&1 &
  eval "pid_$tool=$!"
done
failed=0
for tool in memcheck racecheck synccheck initcheck; do
  eval "wait \$pid_$tool" || failed=1
  echo "$tool: $(tail -n 1 "$out/$tool.txt")," \
    "$(grep -c custom_kernel "$out/$tool.txt") reports name our kernels;" \
    "$(grep -a 'wrong$' "$out/$tool.run.txt")"
done
exit $failed
