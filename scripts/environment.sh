# Sourced by scripts/run and scripts/test: a virtual environment in .venv with hotcold installed from this checkout.
#
#     make_environment               what the product needs
#     make_environment dev,compile   also pytest, ruff, mypy; the compiler of the GPU's kernels
#
# Works in bash 3.2 (macOS). Interrupted half-way, the next call picks up: a half-made .venv is made again, and the
# stamp that says "installed" is written last. PYTHON=/path/to/python chooses the interpreter.

say() { printf '%s\n' "hotcold: $*" >&2; }
die() { say "$@"; exit 1; }
trap '[ -t 2 ] && echo >&2; say "interrupted; run it again to go on"; exit 130' INT  # the terminal shows ^C

quietly() {  # COMMAND...: what it prints is shown only if it fails by itself
    local output status=0
    output=$("$@" 2>&1) || status=$?
    [ "$status" = 0 ] || printf '%s\n' "$output" >&2
    return "$status"
}

find_python() {  # prints the first Python >= 3.10 that runs
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

make_venv() {
    .venv/bin/python -m pip --version >/dev/null 2>&1 && return 0
    local python
    python=$(find_python) || die "needs Python 3.10 or newer; ${PYTHON:-python3} is" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo missing). Name another: PYTHON=/path/to/python3.12 $0"
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || die "$python has no venv module;" \
        "on Debian and Ubuntu: sudo apt install python3-venv"
    say "making a virtual environment in .venv with $("$python" --version 2>&1)"
    quietly "$python" -m venv --clear .venv || die "could not make .venv with $python"
}

make_environment() {  # [EXTRA,…]; the caller stands in the top folder of the checkout
    local extra=${1:-} stamp wanted file installed=
    make_venv
    stamp=.venv/.hotcold-stamp${extra:+-$extra}
    # Editable: edits to the sources need no new install, a changed pyproject.toml or a moved checkout does.
    wanted=$(pwd; cat pyproject.toml)
    for file in "$stamp" "$stamp"-*; do  # the stamp of an install with extras is good for one without
        [ "$(cat "$file" 2>/dev/null)" != "$wanted" ] || installed=yes
    done
    if [ -z "$installed" ]; then
        say "installing hotcold${extra:+ with its extras $extra} into .venv (first time: a minute or two)"
        quietly .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check \
            -e ".${extra:+[$extra]}" || die "pip could not install hotcold, see above; if a package has no wheel for" \
            "this Python, remove .venv and try PYTHON=python3.12 $0"
        printf '%s\n' "$wanted" > "$stamp.part" && mv "$stamp.part" "$stamp"
    fi
    PATH=$PWD/.venv/bin:$PATH
}
