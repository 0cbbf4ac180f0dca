#!/usr/bin/env python3
"""Installs, starts, upgrades and removes the packages in a container, and compares the .rpm with the .deb.

    install.py FOLDER NEWER CACHE

FOLDER contains the output of ./dev package, and NEWER contains packages of a later version of the same program. The
machine is a minimal Debian with systemd in namespaces, so this script needs root and mmdebstrap; its files are kept in
CACHE. Called by ./dev package --test.
"""

import contextlib
import filecmp
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE = 60
CONFIG = """\
http = "127.0.0.1:9464"

[kafka]
"bootstrap.servers" = "127.0.0.1:9"

[[pipeline]]
postgres = "postgresql://walpost@127.0.0.1:9/shop?sslmode=disable"
"""
BOOT = """
set -e
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
for folder in run tmp dev; do mount -t tmpfs tmpfs $folder; done
mkdir dev/pts dev/shm
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mount -t devpts devpts dev/pts -o newinstance,ptmxmode=0666
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount --rbind /sys sys
umount --recursive sys/fs/cgroup || true
mount -t cgroup2 cgroup2 sys/fs/cgroup
mkdir old
pivot_root . old
cd /
umount --lazy /old
export container=walpost-test
exec /lib/systemd/systemd --system --log-level=warning --show-status=0
"""


def fail(reason):
    sys.exit(f"install.py: {reason}")


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        fail(f"{' '.join(map(str, words))} exits with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_until(what, condition):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    fail(f"timed out after {PATIENCE} s waiting for {what}")


def expect(what, found, expected):
    if found != expected:
        fail(f"{what}: found {found!r}, expected {expected!r}")


def debian(cache):
    """Returns an archive of a Debian with systemd and rpm, which is created only once."""
    packed = cache / "debian.tar"
    if packed.exists():
        return packed
    sources = [Path("/etc/apt/sources.list.d") / f"{name}.sources" for name in ("debian", "ubuntu")]
    sources.append(Path("/etc/apt/sources.list"))
    source = next(path for path in sources if path.exists())
    suite = next(line.split("=")[1] for line in Path("/etc/os-release").read_text().splitlines()
                 if line.startswith("VERSION_CODENAME="))
    partial = cache / "debian.partial.tar"
    with source.open() as lines:
        run("mmdebstrap", "--quiet", "--variant=minbase", "--include=systemd,systemd-sysv,rpm,ca-certificates",
            suite, str(partial), stdin=lines)
    partial.rename(packed)
    return packed


class ControlGroup:
    """A control group for a machine, which systemd treats as the root of the hierarchy."""

    def __enter__(self):
        self.mount = tempfile.mkdtemp()
        run("mount", "-t", "cgroup2", "cgroup2", self.mount)
        self.path = Path(self.mount, f"walpost-package-{os.getpid()}")
        self.path.mkdir()
        return self

    def enter(self):
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *_):
        (self.path / "cgroup.kill").write_text("1")
        wait_until("the processes to end", lambda: "populated 0" in (self.path / "cgroup.events").read_text())
        for folder, _, _ in os.walk(self.path, topdown=False):
            os.rmdir(folder)
        run("umount", self.mount)
        os.rmdir(self.mount)


class Machine:
    def __init__(self, root, pid):
        self.root, self.pid = root, pid

    def attempt(self, command):
        words = ["nsenter", "--target", str(self.pid), "--all", "sh", "-c", command]
        return subprocess.run(words, capture_output=True, text=True)

    def run(self, command):
        done = self.attempt(command)
        if done.returncode:
            journal = self.attempt("journalctl --no-pager --lines 30").stdout
            fail(f"{command} exits with {done.returncode}: {done.stdout}{done.stderr}\n{journal}")
        return done.stdout.strip()

    def state(self):
        """Returns whether the service is active, and whether it is enabled."""
        words = (self.attempt(f"systemctl {word} walpost").stdout.strip() for word in ("is-active", "is-enabled"))
        return tuple(words)

    def main_pid(self):
        return self.run("systemctl show --property MainPID --value walpost")

    def health(self):
        """Returns the status code of /healthz, requested in the network namespace of the machine."""
        program = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9464/healthz').status)"
        return run("nsenter", "--target", str(self.pid), "--net", sys.executable, "-c", program).strip()


@contextlib.contextmanager
def machine(cache):
    with tempfile.TemporaryDirectory(dir=cache) as root, ControlGroup() as group:
        run("tar", "--extract", "--file", str(debian(cache)), "--directory", root, "--exclude=./dev/*")
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--net", "--cgroup"]
        process = subprocess.Popen([*unshare, "bash", "-c", BOOT, "boot", root], preexec_fn=group.enter,
                                   stdin=subprocess.DEVNULL)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            wait_until("the machine's first process", lambda: children.read_text().split())
            booted = Machine(Path(root), int(children.read_text().split()[0]))
            is_up = ("running", "degraded")
            wait_until("systemd", lambda: booted.attempt("systemctl is-system-running").stdout.strip() in is_up)
            yield booted
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


class Deb:
    pattern, list_files = "*.deb", "dpkg -L walpost"
    install = upgrade = again = "dpkg --install"
    remove = "dpkg --remove walpost"
    verify = "dpkg --verify walpost"


class Rpm:
    pattern, list_files = "*.rpm", "rpm -ql walpost"
    # The machine's libraries are Debian packages, which rpm does not recognize.
    install, upgrade = "rpm --install --nodeps", "rpm --upgrade --nodeps"
    again = "rpm --upgrade --replacepkgs --nodeps"
    remove = "rpm --erase walpost"
    verify = "rpm --verify --nodeps walpost"


def package(folder, kind):
    found = list(folder.glob(kind.pattern))
    expect(f"packages {kind.pattern} in {folder}", len(found), 1)
    return found[0]


def live(at, kind, folder, newer):
    """Tests the life cycle of a package from its installation to its removal."""
    for where, name in ((folder, "first"), (newer, "second")):
        shutil.copy(package(where, kind), at.root / f"var/{name}{kind.pattern[1:]}")
    first, second = (f"/var/{name}{kind.pattern[1:]}" for name in ("first", "second"))
    at.run(f"{kind.install} {first}")
    account = at.run("getent passwd walpost").split(":")
    expect("the account's shell", account[6].endswith("/nologin"), True)
    expect("/etc/walpost", at.run("stat --format '%a %U %G' /etc/walpost"), "750 root walpost")
    expect("the service after the installation", at.state(), ("inactive", "disabled"))
    expect("the files that differ from the package", at.run(kind.verify), "")
    version = at.run("walpost --version").split()[1]

    if at.attempt("systemctl start walpost").returncode == 0:
        fail("the service starts without a configuration")
    expect("the service without a configuration", at.run("systemctl show --property ExecMainStatus --value walpost"), "2")
    config = at.root / "etc/walpost/walpost.toml"
    config.write_text(CONFIG)
    at.run("systemctl enable --now walpost")
    expect("the service", at.state(), ("active", "enabled"))
    before = at.main_pid()
    user = at.run(f"stat --format %U /proc/{before}")
    expect("the service's account", user, "walpost")
    expect("the program", at.run(f"readlink /proc/{before}/exe"), "/usr/bin/walpost")
    expect("the status of /healthz", at.health(), "200")
    at.run("walpost pipeline list")

    at.run("chmod 700 /etc/walpost && chown walpost /etc/walpost")
    at.run(f"{kind.upgrade} {second}")
    expect("/etc/walpost after the upgrade", at.run("stat --format '%a %U %G' /etc/walpost"), "700 walpost walpost")
    expect("the service after the upgrade", at.state(), ("active", "enabled"))
    after = at.main_pid()
    if before == after:
        fail("the upgrade did not restart the service")
    wait_until("the new process", lambda: at.attempt("walpost pipeline list").returncode == 0)
    expect("the configuration after the upgrade", config.read_text(), CONFIG)

    # A service that can't start must not make an upgrade fail.
    config.write_text("invalid")
    at.run(f"{kind.again} {second}")
    expect("whether the service runs with an invalid configuration", at.state()[0] == "active", False)
    config.write_text(CONFIG)
    at.run("systemctl reset-failed walpost; systemctl start walpost")

    files = at.run(kind.list_files).splitlines()
    at.run(kind.remove)
    active, enabled = at.state()
    # Some versions of systemd print nothing about a unit that does not exist.
    if active != "inactive" or enabled not in ("", "not-found"):
        fail(f"the service after the removal is {active} and {enabled}")
    left = [path for path in files if "walpost" in path and path != "/etc/walpost" and (at.root / path[1:]).exists()]
    expect("the remaining files", left, [])
    expect("the configuration after the removal", config.read_text(), CONFIG)
    expect("the account after the removal", at.run("getent passwd walpost").split(":"), account)
    config.unlink()
    config.parent.rmdir()
    at.run("systemctl reset-failed")
    print(f"walpost {version}: {kind.pattern[2:]} installed, started, upgraded and removed")


def tree(root):
    """Every file and folder of an unpacked package, with its mode."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        # In Debian, zsh reads its completions from another directory.
        name = name.replace("zsh/vendor-completions", "zsh/site-functions")
        found[name] = stat.filemode(path.lstat().st_mode), path
    return found


def compare(folder):
    with tempfile.TemporaryDirectory() as unpacked:
        deb, rpm = Path(unpacked, "deb"), Path(unpacked, "rpm")
        run("dpkg-deb", "--extract", str(package(folder, Deb)), str(deb))
        rpm.mkdir()
        archive = subprocess.run(["rpm2cpio", str(package(folder, Rpm))], check=True, capture_output=True).stdout
        subprocess.run(["cpio", "--extract", "--make-directories", "--quiet"], input=archive, cwd=rpm, check=True)
        of_deb, of_rpm = tree(deb), tree(rpm)
        # The .rpm creates this folder in a script, so that an upgrade does not reset its mode.
        for name in ("etc", "etc/walpost"):
            del of_deb[name]
        expect("the files in the .rpm", sorted(of_rpm), sorted(of_deb))
        for name, (mode, path) in of_deb.items():
            of_mode, other = of_rpm[name]
            # An .rpm does not contain system directories.
            if path.is_dir() and "walpost" not in name:
                continue
            expect(f"the mode of {name} in the .rpm", of_mode, mode)
            if path.is_file() and not filecmp.cmp(path, other, shallow=False):
                fail(f"{name} differs between the .deb and the .rpm")
        files = sum(path.is_file() for _, path in of_deb.values())
    for owner in set(re.findall(r"^\S+ +(\S+)", run("dpkg-deb", "--contents", str(package(folder, Deb))), re.MULTILINE)):
        expect("an owner in the .deb", owner, "root/root")
    listed = run("rpm", "--query", "--package", "--queryformat", "[%{FILEUSERNAME}/%{FILEGROUPNAME}\n]",
                 str(package(folder, Rpm)))
    expect("the owners in the .rpm", set(listed.split()), {"root/root"})
    needed = run("rpm", "--query", "--package", "--requires", str(package(folder, Rpm)))
    versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", needed)]
    if not versions or max(versions) > (2, 28):
        fail(f"the .rpm requires {needed}")
    print(f"the .rpm has the {files} files of the .deb, with the same contents, modes and owners")


def check_rest(folder):
    """The checksums, the SBOM, and what the archive has."""
    run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=folder)
    named = {line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    expect("the files in SHA256SUMS", named, {path.name for path in folder.iterdir()} - {"SHA256SUMS"})
    (sbom,) = folder.glob("*.cdx.json")
    document = json.loads(sbom.read_text())
    components = {(item["name"], item["version"]) for item in document["components"] if "cpe" not in item}
    libraries = {item["name"] for item in document["components"] if "cpe" in item}
    expect("the C libraries in the SBOM", libraries, {"jemalloc", "librdkafka", "openssl", "zlib", "zstandard"})
    locked = Path("Cargo.lock").read_text()
    locked = set(re.findall(r'^name = "(.*)"\nversion = "(.*)"$', locked, re.MULTILINE))
    unknown = components - locked
    if unknown or not {"openssl-sys", "rdkafka-sys", "tokio"} <= {name for name, _ in components}:
        fail(f"{sbom.name}: its components are not those of Cargo.lock: {sorted(unknown)}")
    if os.getcwd() in sbom.read_text():
        fail(f"{sbom.name} contains the path of its build directory")
    (archive,) = folder.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        run("tar", "--extract", "--gzip", "--file", str(archive), "--directory", unpacked)
        (top,) = Path(unpacked).iterdir()
        expect("the folder in the archive", archive.name, f"{top.name}.tar.gz")
        version = run(str(top / "walpost"), "--version")
        for name in ("LICENSE", "THIRD-PARTY.txt", "README.md", "man/walpost-run.1.gz", "completions/walpost.bash",
                     "walpost.service", "sql/outbox.sql", "docs/deploy.md"):
            if not (top / name).is_file():
                fail(f"{archive.name} has no {name}")
    print(f"{version.strip()}: checksums, archive and SBOM with {len(components)} components")


def main():
    folder, newer, cache = map(Path, sys.argv[1:])
    check_rest(folder)
    compare(folder)
    with machine(cache) as at:
        for kind in (Deb, Rpm):
            live(at, kind, folder, newer)


main()
