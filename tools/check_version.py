"""One version everywhere: Cargo.toml, the changelog's top heading, and the tag if HEAD has one."""

from __future__ import annotations

import re
import subprocess
import sys

from source import ROOT, text


def main() -> int:
    """Compare them."""
    version = re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', text("Cargo.toml"), re.M)
    headings = re.findall(r"^## (?:\[)?([\w.+-]+)", text("CHANGELOG.md"), re.M)
    if version is None or not headings:
        print("Cargo.toml has no workspace version, or CHANGELOG.md no heading")
        return 1
    describe = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(
        describe, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tags:
        if headings[0] in {"Unreleased", version[1]}:
            return 0
        print(f"CHANGELOG.md opens with {headings[0]}; expected Unreleased or {version[1]}")
        return 1
    if tags == [f"v{version[1]}"] and headings[0] == version[1]:
        return 0
    print(f"tag {tags}, Cargo.toml {version[1]}, CHANGELOG.md {headings[0]}: expected one version")
    return 1


if __name__ == "__main__":
    sys.exit(main())
