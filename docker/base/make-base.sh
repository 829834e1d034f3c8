#!/usr/bin/env bash
# Make a base image out of this machine's Python, where no registry can be reached: seconds, about 65 MB, no network.
#
#   docker/base/make-base.sh [IMAGE]            python, its stdlib, a shell, certificates; the default is gpufaas-base
#   docker/base/make-base.sh IMAGE PROGRAM...   these programs (names on the PATH, or paths) instead of Python
#
# In it is what each program is linked with, as ldd says, under the names that it is looked for. Production images are
# made on python:3.12-slim, which gets its security updates from Debian; this one is as old as this machine is.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin  # where haproxy is, also for who is not root

image=${1:-gpufaas-base}
shift || true
python=$("${PYTHON:-python3}" -c 'import os, sys; print(os.path.realpath(sys.executable))')
from=${FROM:-}  # where programs were unpacked that are not installed here: left out of the names in the image
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

linked() {  # what these are linked with, and their loader
    ldd "$@" 2>/dev/null | sed -nE 's#^.*=> (/[^ ]+) \(0x.*#\1#p; s#^\t(/[^ ]+) \(0x.*#\1#p' | sort -u
}

put() {  # files, by their own names, whatever they link to
    local each to
    for each in "$@"; do
        to=$root${each#"$from"}
        [ -e "$to" ] && continue
        mkdir -p "$(dirname "$to")"
        cp -L "$each" "$to"
    done
}

mkdir -p "$root"/{etc,tmp,usr/local/bin,usr/bin,bin}
chmod 1777 "$root/tmp"
printf 'root:x:0:0:root:/root:/bin/sh\ngpufaas:x:10001:10001::/home/gpufaas:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\ngpufaas:x:10001:\n' >"$root/etc/group"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || put /etc/ssl/certs/ca-certificates.crt

if (($#)); then
    programs=()
    for each in "$@"; do
        found=$(command -v "$each") || { echo "there is no $each on the PATH: install it" >&2; exit 1; }
        path=$(readlink -f "$found")
        programs+=("$path")
        install -D "$path" "$root/usr/local/bin/$(basename "$each")"
    done
    mapfile -t libraries < <(linked "${programs[@]}")
else
    stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    mkdir -p "$root$stdlib"
    tar -C "$stdlib" -c --exclude=__pycache__ --exclude=./test --exclude=tests --exclude=idlelib --exclude=tkinter \
        --exclude=turtledemo --exclude=lib2to3 --exclude=ensurepip --exclude=pydoc_data --exclude=./site-packages \
        --exclude=./dist-packages --exclude='./config-*' . | tar -C "$root$stdlib" -x
    put "$python" /bin/sh
    mapfile -t libraries < <(linked "$python" /bin/sh "$stdlib"/lib-dynload/*.so)
    # What torch and other wheels are linked with, and glibc's stubs that only they still ask for.
    cache=$(ldconfig -p 2>/dev/null || true)
    for each in libstdc++.so.6 libgcc_s.so.1 libgomp.so.1 libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 libm.so.6; do
        path=$(awk -v name="$each" '$1 == name && /x86-64|AArch64/ && !found++ {print $NF}' <<<"$cache")
        [ -z "$path" ] || libraries+=("$path")
    done
    ln -sf "$python" "$root/usr/local/bin/python3"
    ln -sf "$python" "$root/usr/local/bin/python"
fi
put "${libraries[@]}"
find "$root" -type d ! -path "$root/tmp" -exec chmod 755 {} +
tar -C "$root" --owner=0 --group=0 --numeric-owner -c . |
    docker import -c 'ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8' - "$image" >/dev/null
echo "$image: $(docker image inspect -f '{{.Size}}' "$image" | awk '{printf "%.0f MB", $1 / 1e6}')"
