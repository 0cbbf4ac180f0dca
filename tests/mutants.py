#!/usr/bin/env python3
"""Runs the unit tests against every change that cargo-mutants lists, with all changes in one program.

cargo-mutants builds the crate again for each change, which takes hours for a thousand changes. This script replaces the
body of each function with a match on the environment variable MUTANT that has an arm for each change and one for the
original body. A single build then contains all changes, and testing a change takes only a run of the tests. Changes
that do not compile as an arm are left out and counted.

    mutants.py TREE LIST OUTPUT [RE]

TREE is a copy of the repository that the script may change, LIST is the output of `cargo mutants --list --json`, and
OUTPUT is a file that gets one line per change. With RE, only changes whose name matches are tested. Fails if the tests
do not detect a change.
"""

import collections
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# These tests wait for time to pass, or test code that is not pure.
SLOW = ["--skip", "kafka::", "--skip", "connect::dial::tests::"]
# The simulation may detect changes that the other tests do not detect.
PASSES = [[*SLOW, "--skip", "sim::"], SLOW]
SEEDS = "300"
# A change can make the program allocate memory without limit.
MEMORY_KIB = 6_000_000
SWITCH = """
/// Returns the number of the enabled change.
pub(crate) fn mutant() -> usize {
    static MUTANT: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *MUTANT.get_or_init(|| std::env::var("MUTANT").ok().and_then(|it| it.parse().ok()).unwrap_or(usize::MAX))
}
"""
LINTS = "#![allow(warnings, clippy::all, arithmetic_overflow, unconditional_panic)]\n"


class Source:
    """A file, addressed by lines and columns that start at 1."""

    def __init__(self, text):
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, span):
        return tuple(self.starts[span[end]["line"] - 1] + span[end]["column"] - 1 for end in ("start", "end"))


def body(text, span, name):
    """Returns the range of the function's body without its braces, or None if it can't become a match."""
    item = text[span[0] : span[1]]
    name = name.split("::")[-1].split("<")[0]
    head = re.search(rf"\bfn\s+(r#)?{re.escape(name)}\b", item)
    if not head or re.search(r"\bconst\s+(unsafe\s+)?fn\s+\S+$", item[: head.end()]):
        return None
    return span[0] + item.index("{", head.end()) + 1, span[1] - 1


def instrument(text, changes, left_out):
    """Returns the file with all its changes, and the line ranges of each change."""
    source = Source(text)
    functions = collections.defaultdict(list)
    for number, change in changes:
        if number in left_out:
            continue
        if not change.get("function"):
            left_out[number] = "it is not in a function"
            continue
        functions[source.span(change["function"]["span"])].append((number, change))
    out, at, line, owners = "", 0, 1, []

    def add(piece, owner=None):
        nonlocal out, line
        out += piece
        first, line = line, line + piece.count("\n")
        if owner is not None:
            owners.append((first, line, owner))

    for span, inside in sorted(functions.items()):
        found = body(text, span, inside[0][1]["function"]["function_name"])
        if found is None or span[0] < at:
            left_out.update((number, "its function can't be switched") for number, _ in inside)
            continue
        start, end = found
        add(text[at:start] + " match crate::mutant() {\n")
        for number, change in inside:
            first, last = source.span(change["span"])
            changed = text[start:first] + " " + change["replacement"] + " " + text[last:end]
            add(f"{number} => {{{changed}\n}}\n", [number])
        add("_ => {" + text[start:end] + "\n}\n", [number for number, _ in inside])
        add("}")
        at = end
    add(text[at:])
    return out, owners


def cargo(tree, *arguments):
    command = ["cargo", *arguments, "--locked", "--lib", "--message-format=json"]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode == 0, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def errors(messages):
    return [it for it in messages if it["reason"] == "compiler-message" and it["message"]["level"] == "error"]


def blame(messages, owners, left_out):
    """Leaves out the changes that do not compile: those of an arm or, if necessary, of the whole function."""
    before = len(left_out)
    for message in errors(messages):
        for span in message["message"]["spans"]:
            within = [
                numbers
                for first, last, numbers in owners.get(span["file_name"], [])
                if span["is_primary"] and first <= span["line_start"] <= last
            ]
            for number in min(within, key=len, default=[]):
                left_out.setdefault(number, message["message"]["message"])
    return len(left_out) > before


def build(tree, mutants):
    """Returns the test program with all changes that compile, and the reasons why other changes are left out."""
    files = collections.defaultdict(list)
    for number, change in enumerate(mutants):
        files[change["file"]].append((number, change))
    original = {name: (tree / name).read_text() for name in files}
    root = tree / "src/lib.rs"
    # The attributes of the crate must follow its documentation.
    doc, code = re.match(r"((?://![^\n]*\n)*)(.*)", root.read_text(), re.DOTALL).groups()
    root.write_text(doc + LINTS + code + SWITCH)
    left_out = {}
    while True:
        owners = {}
        for name, changes in files.items():
            text, owners[name] = instrument(original[name], changes, left_out)
            (tree / name).write_text(text)
        compiles, messages = cargo(tree, "check", "--profile", "test")
        if compiles:
            break
        if not blame(messages, owners, left_out):
            print("".join(text["message"]["rendered"] for text in errors(messages)))
            sys.exit("mutants: it does not compile, and not for a change")
    compiles, messages = cargo(tree, "test", "--no-run")
    programs = [message["executable"] for message in messages if message.get("executable")]
    if not compiles or len(programs) != 1:
        sys.exit(f"mutants: found {len(programs)} test programs, expected 1")
    return programs[0], left_out


def run(program, tree, number, arguments, seconds):
    """Returns the outcome of a change in these tests."""
    environment = dict(os.environ, MUTANT=str(number), SIM_SEEDS=SEEDS, RUST_BACKTRACE="0")
    command = ["sh", "-c", f'ulimit -v {MEMORY_KIB}; exec "$0" "$@"', program, *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, timeout=seconds, check=False, **quiet)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "caught" if done.returncode != 0 else "missed"


def main(tree, listed, output, pattern=""):
    tree = Path(tree)
    mutants = json.loads(Path(listed).read_text())
    program, left_out = build(tree, mutants)
    chosen = [number for number, change in enumerate(mutants) if re.search(pattern, change["name"])]
    outcome = {number: "missed" for number in chosen if number not in left_out}
    for arguments in PASSES:
        started = time.monotonic()
        if run(program, tree, len(mutants), arguments, None) != "missed":
            sys.exit("mutants: the tests fail without a change")
        # One process per processor runs at a time, and the machine may be busy with other work.
        seconds = 20 + 5 * os.cpu_count() * (time.monotonic() - started)
        alive = [number for number, word in outcome.items() if word == "missed"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            words = pool.map(lambda number: run(program, tree, number, arguments, seconds), alive)
            outcome.update(zip(alive, words))
        found = collections.Counter(outcome.values())
        print(f"mutants: {found['missed']} of {len(outcome)} are not noticed so far", flush=True)
    with open(output, "w", encoding="utf-8") as lines:
        for number in chosen:
            word = outcome.get(number) or f"left out: {left_out[number]}"
            lines.write(f"{mutants[number]['name']}: {word}\n")
            if word == "missed":
                print(f"not noticed: {mutants[number]['name']}")
    print(f"{found['caught']} noticed, {found['timeout']} noticed by the time they took, {found['missed']} not,")
    print(f"{len(chosen) - len(outcome)} left out; see {output}")
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
