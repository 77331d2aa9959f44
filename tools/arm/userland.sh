#!/usr/bin/env bash
# An Arm userland with Python and torch in .build/arm/root, for qemu-user: `make test-arm` runs tests in it.
#
# Needs Debian's packages debootstrap and qemu-user, libcapstone4 to count instructions, and 6 GB of disk.
set -euo pipefail
cd "$(dirname "$0")/../.."
torch=${1:-2.15.0}
home=.build/arm root=.build/arm/root
test -e "$home/.ready-$torch" && exit 0
mkdir -p "$home"

if [ ! -e "$home/.debian" ]; then
    rm -rf "$root"
    packages=python3,python3-pip,libgomp1,libstdc++6,binutils
    debootstrap --foreign --arch=arm64 --variant=minbase --include=$packages bookworm "$root"
    # The packages' files suffice: debootstrap's second stage would run every package's scripts under emulation.
    for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    touch "$home/.debian"
fi

# pip takes a platform tag literally, and evaluates markers for the machine that it runs on.
platforms=(--platform linux_aarch64)
for minor in $(seq 17 28); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
platforms+=(--platform manylinux2014_aarch64)
python3 -m pip download --quiet --only-binary :all: --python-version 3.11 "${platforms[@]}" --dest "$home/wheels" \
    "torch==$torch" numpy pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 hypothesis==6.168.5
site=$root/usr/lib/python3/dist-packages
mkdir -p "$site"
# Wheels are unpacked without pip: `pip install --target` does not merge the folders of NVIDIA's packages.
for wheel in "$home"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
rm -r "$home/wheels"

# torch's cpuinfo library fails on the /proc/cpuinfo of x86. This file describes a Neoverse V2, Grace's core.
mkdir -p "$root/proc"
for processor in 0 1; do
    printf 'processor\t: %s\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics\n' $processor
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n\n'
done > "$root/proc/cpuinfo"
touch "$home/.ready-$torch"
