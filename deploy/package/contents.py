#!/usr/bin/env python3
"""Lists the contents of the program: the crates, and the C libraries in their sources.

    contents.py notices      prints all licenses
    contents.py sbom FILE    prints the SBOM that cargo-cyclonedx wrote to FILE, with the C libraries added and the name of
                             the build folder removed
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

# Crates with the sources of C libraries: the library, its vendor, its license, and the file with the license text.
BUNDLED = {
    "openssl-src": ("openssl", "openssl", "Apache-2.0", "openssl/LICENSE.txt"),
    "rdkafka-sys": ("librdkafka", "confluent", "BSD-2-Clause", "librdkafka/LICENSES.txt"),
    "zstd-sys": ("zstandard", "facebook", "BSD-3-Clause", "zstd/LICENSE"),
    "libz-sys": ("zlib", "zlib", "Zlib", "src/zlib/LICENSE"),
    "tikv-jemalloc-sys": ("jemalloc", "jemalloc", "BSD-2-Clause", "jemalloc/COPYING"),
}
LICENCE = re.compile(r"^(licen[cs]e|copying|notice|copyright|unlicense)", re.IGNORECASE)


def packages():
    """The crates that are linked into the program, by name."""
    target = f"{os.uname().machine}-unknown-linux-gnu"
    words = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    metadata = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    by_id = {package["id"]: package for package in metadata["packages"]}
    seen, waiting = set(), [metadata["resolve"]["root"]]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        for dependency in nodes[at]["deps"]:
            kinds = {kind["kind"] for kind in dependency["dep_kinds"]}
            if None in kinds:
                waiting.append(dependency["pkg"])
            elif by_id[dependency["pkg"]]["name"] in BUNDLED:
                # A build script compiles the C sources; its own dependencies are not in the program.
                seen.add(dependency["pkg"])
    seen.discard(metadata["resolve"]["root"])
    return sorted((by_id[at] for at in seen), key=lambda package: (package["name"], package["version"]))


def library_version(package):
    """The version of the C library in a crate: most crates append it to their own version after a plus sign."""
    if package["name"] == "libz-sys":
        header = Path(package["manifest_path"]).parent / "src/zlib/zlib.h"
        return re.search(r'#define ZLIB_VERSION "([^"]*)"', header.read_text()).group(1)
    return re.search(r"\+(?:zstd\.)?(\d+(?:\.\d+)*)", package["version"]).group(1)


def sbom(path):
    text = Path(path).read_text().replace(f"path+file://{os.getcwd()}", "")
    document = json.loads(text)
    for package in packages():
        if package["name"] in BUNDLED:
            name, vendor, licence, _ = BUNDLED[package["name"]]
            version = library_version(package)
            document["components"].append({
                "type": "library",
                "bom-ref": f"{name}@{version}",
                "name": name,
                "version": version,
                "scope": "required",
                "licenses": [{"license": {"id": licence}}],
                "cpe": f"cpe:2.3:a:{vendor}:{name}:{version}:*:*:*:*:*:*:*",
                "purl": f"pkg:generic/{name}@{version}",
            })
    print(json.dumps(document, indent=2))


def notices():
    missing = set(BUNDLED)
    # The crates that use each license text.
    texts = {}
    print("Walpost contains these libraries. Their licenses follow; a text that several libraries share is printed once.\n")
    for package in packages():
        name = f"{package['name']} {package['version']}"
        print(f"{name}, {package['license']}")
        folder = Path(package["manifest_path"]).parent
        files = sorted(path for path in folder.iterdir() if LICENCE.match(path.name) and path.is_file())
        bundled = [folder / BUNDLED[package["name"]][3]] if package["name"] in BUNDLED else []
        missing.discard(package["name"])
        absent = [str(path) for path in bundled if not path.exists()]
        if absent:
            sys.exit(f"contents.py: {name} has no file {', '.join(absent)}")
        for path in files + bundled:
            text = path.read_text(errors="replace").strip()
            texts.setdefault(text, []).append(f"{name}, {path.relative_to(folder)}")
    for text, places in texts.items():
        print("\n" + "=" * 80, *places, "", text, sep="\n")
    if missing:
        sys.exit(f"contents.py: no longer a dependency: {', '.join(sorted(missing))}")


match sys.argv[1:]:
    case ["notices"]:
        notices()
    case ["sbom", path]:
        sbom(path)
    case _:
        sys.exit(__doc__)
