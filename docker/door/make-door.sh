#!/usr/bin/env bash
# Make an image with Debian's haproxy, where no registry can be reached but Debian's packages can, or it is installed.
#
#   docker/door/make-door.sh [IMAGE]        the default is gpufaas-door-base
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
image=${1:-gpufaas-door-base}
if command -v haproxy >/dev/null; then
    exec "$here/../base/make-base.sh" "$image" haproxy
fi
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
(cd "$packages" && apt-get download haproxy liblua5.3-0 libopentracing-c-wrapper0 libopentracing1 >/dev/null 2>&1) || {
    echo "haproxy is not installed here, and apt-get download does not get it: install it, or have docker pull haproxy" >&2
    exit 1
}
for each in "$packages"/*.deb; do dpkg -x "$each" "$packages/root"; done
libraries=$(dirname "$(find "$packages/root/usr/lib" -name 'liblua5.3.so.0' | head -1)")
LD_LIBRARY_PATH=$libraries FROM=$packages/root "$here/../base/make-base.sh" "$image" "$packages/root/usr/sbin/haproxy"
