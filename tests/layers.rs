//! Checks the dependencies between the top-level modules of `src/`: a module may refer only to
//! modules of lower ranks.
//!
//! Finds every path that begins with `crate`, `super` or `self`, whether in an import, a body or a
//! macro, and resolves it to a top-level module. A path to a module of a higher rank, or to another
//! module of the same rank, is an error. Cyclic references between files are also an error. The
//! same rules apply to tests in `src/`: a unit test that needs a module of a higher rank belongs in
//! that module. Comments and strings are ignored.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};

/// The top-level modules, from the highest rank to the lowest. A module may refer to itself and to
/// modules of lower ranks.
const RANKS: &[&[&str]] = &[
    &["fuzz"],
    &["cli"],
    &["config", "import"],
    &["supervisor"],
    &["observe"],
    &["replay", "skip", "verify"],
    // Replay and retention must agree on which partitions have been detached, so replay uses the
    // implementation in retention.
    &["retention"],
    &["pipeline"],
    &["kafka", "postgres"],
    &["sink"],
    &["delivery"],
    &["outbox"],
    &["model"],
    // The modules of this rank deal only with text and numbers, not with any of Walpost's own
    // types.
    &["authorities", "file_error", "program", "progress"],
    // Every other module must read files through trusted_path.
    &["trusted_path"],
    &["escape"],
];

/// Crates that only one module may use directly. Other modules use that module's wrappers.
const OWNERS: &[(&str, &str)] = &[
    ("rdkafka", "kafka"),
    ("rdkafka_sys", "kafka"),
    ("postgres_protocol", "postgres"),
    ("tokio_postgres", "postgres"),
];

/// A path to an item in this crate, relative to the crate's root.
#[derive(Debug, PartialEq, Eq)]
struct InternalPath {
    line: usize,
    path: Vec<String>,
}

/// A reference to an external crate that only one module may use.
#[derive(Debug, PartialEq, Eq)]
struct ExternalCrate {
    line: usize,
    name: String,
}

/// All references that a file contains.
#[derive(Debug, Default)]
struct References {
    internal: Vec<InternalPath>,
    external: Vec<ExternalCrate>,
}

/// A reference that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Violation {
    file: String,
    line: usize,
    reason: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.reason)
    }
}

/// Returns the references in the source code `text` of the given module.
fn references(text: &str, module: &[String]) -> References {
    let tokens = TokenStream::from_str(text).expect("a Rust file");
    let mut references = References::default();
    walk(tokens, module, &mut references);
    references
}

fn walk(tokens: TokenStream, module: &[String], references: &mut References) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(ident) if ident == "mod" => {
                // `mod name { ... }` is an inline module, whereas `mod name;` refers to another
                // file.
                if let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(body))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                    && body.delimiter() == Delimiter::Brace
                {
                    let inner = [module, &[name.to_string()]].concat();
                    walk(body.stream(), &inner, references);
                    at += 3;
                    continue;
                }
                at += 1;
            }
            TokenTree::Ident(ident) => {
                let is_first = at == 0 || !is_separator(&tokens[..at]);
                if !is_first {
                    at += 1;
                } else if is_root(ident) {
                    at = path(&tokens, at, module, Vec::new(), references);
                } else {
                    let name = ident.to_string();
                    let is_path =
                        begins_with_separator(&tokens[at + 1..]) || is_import(&tokens, at);
                    if is_path && OWNERS.iter().any(|(owned, _)| *owned == name) {
                        let line = ident.span().start().line;
                        references.external.push(ExternalCrate { line, name });
                    }
                    at += 1;
                }
            }
            TokenTree::Group(group) => {
                walk(group.stream(), module, references);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

fn is_root(ident: &Ident) -> bool {
    ["crate", "super", "self"].iter().any(|root| ident == root)
}

fn is_punct(token: Option<&TokenTree>, expected: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == expected)
}

fn begins_with_separator(tokens: &[TokenTree]) -> bool {
    is_punct(tokens.first(), ':') && is_punct(tokens.get(1), ':')
}

/// Returns whether these tokens end with a `::` that continues a path. A `::` at the beginning of a
/// path refers to a crate instead.
fn is_separator(before: &[TokenTree]) -> bool {
    let ends = before.len() >= 2
        && is_punct(before.last(), ':')
        && is_punct(before.get(before.len() - 2), ':');
    ends && match before.len().checked_sub(3).map(|at| &before[at]) {
        Some(TokenTree::Ident(ident)) => ident != "use" && ident != "return" && ident != "in",
        Some(TokenTree::Punct(punct)) => punct.as_char() == '>',
        Some(_) => true,
        None => false,
    }
}

/// Returns whether the token is `name` in `use name;`, `use name as other;` or `extern crate
/// name;`, or a member of `use {name, ...};`.
fn is_import(tokens: &[TokenTree], at: usize) -> bool {
    at > 0
        && matches!(&tokens[at - 1], TokenTree::Ident(ident) if ident == "use" || ident == "extern")
        || at > 1 && matches!(&tokens[at - 2], TokenTree::Ident(ident) if ident == "extern")
}

/// Reads a path that begins at the token `at` and is relative to `prefix`. Returns the index after
/// the path.
fn path(
    tokens: &[TokenTree],
    mut at: usize,
    module: &[String],
    mut prefix: Vec<String>,
    references: &mut References,
) -> usize {
    let mut line = 0;
    let mut is_glob = false;
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(ident)) => {
                line = ident.span().start().line;
                prefix.push(ident.to_string());
                at += 1;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let members: Vec<_> = group.stream().into_iter().collect();
                for member in members.split(|token| is_punct(Some(token), ',')) {
                    if !member.is_empty() {
                        path(member, 0, module, prefix.clone(), references);
                    }
                }
                return at + 1;
            }
            Some(token) if is_punct(Some(token), '*') => {
                line = token.span().start().line;
                is_glob = true;
                at += 1;
                break;
            }
            // The `::` in `Vec::<crate::A>::new` precedes generic arguments, which the caller
            // processes like all other tokens.
            _ => break,
        }
        if !begins_with_separator(&tokens[at..]) {
            break;
        }
        at += 2;
    }
    // A method's receiver, `pub(crate)` and a lone `$crate` do not refer to a module.
    if is_glob || prefix.len() > 1 {
        let path = resolve(module, &prefix);
        references.internal.push(InternalPath { line, path });
    }
    at
}

/// Resolves a path in the given module to a path that starts at the crate's root.
fn resolve(module: &[String], path: &[String]) -> Vec<String> {
    let mut base = Vec::new();
    let mut rest = path.iter().peekable();
    match path.first().map(String::as_str) {
        Some("crate") => drop(rest.next()),
        _ => base = module.to_vec(),
    }
    while let Some(step) = rest.peek() {
        match step.as_str() {
            "super" => drop(base.pop()),
            "self" => {}
            _ => break,
        }
        rest.next();
    }
    base.extend(rest.cloned());
    base
}

/// Returns the module that a file in `src/` contains.
fn module(file: &Path) -> Vec<String> {
    let path = file.with_extension("");
    let parts = path.iter().map(|part| part.to_string_lossy().into_owned());
    let mut module: Vec<_> = parts.collect();
    if module == ["lib"] {
        module.clear();
    }
    module
}

fn rank(top_module: &str) -> Option<usize> {
    RANKS.iter().position(|rank| rank.contains(&top_module))
}

/// Returns the rule violations in the source code `text` of the file.
fn violations(file: &Path, text: &str) -> Vec<Violation> {
    let module = module(file);
    // src/lib.rs is exempt, because it declares all top-level modules.
    let Some(top_module) = module.first() else {
        return Vec::new();
    };
    let violation = |line, reason| Violation {
        file: Path::new("src").join(file).display().to_string(),
        line,
        reason,
    };
    let Some(own) = rank(top_module) else {
        return vec![violation(
            1,
            format!("module {top_module} has no rank in tests/layers.rs"),
        )];
    };
    let references = references(text, &module);
    let below: Vec<_> = RANKS[own + 1..].concat();
    let internal = references.internal.iter().filter_map(|named| {
        let target = named
            .path
            .first()
            .map_or("the crate's root", String::as_str);
        let reason = match rank(target) {
            _ if target == top_module => return None,
            Some(rank) if rank > own => return None,
            Some(rank) if rank == own => "a module of the same rank",
            Some(_) => "a higher module",
            None => "which is not a top-level module",
        };
        let path = named.path.join("::");
        Some(violation(
            named.line,
            format!(
                "{top_module} refers to {target}, {reason}: {path}. {top_module} may refer to {}",
                below.join(", ")
            ),
        ))
    });
    let external = references.external.iter().filter_map(|external| {
        let (_, owner) = OWNERS.iter().find(|(name, _)| *name == external.name)?;
        let name = &external.name;
        (owner != top_module).then(|| {
            violation(
                external.line,
                format!("{top_module} refers to {name}, but only {owner} may"),
            )
        })
    });
    internal.chain(external).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn modules_refer_only_to_modules_in_lower_layers() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    found.sort();
    assert!(found.len() > 100, "the files of src/: {}", found.len());
    let violations: Vec<_> = found
        .iter()
        .filter(|file| !file.ends_with("src/main.rs"))
        .flat_map(|file| {
            let text = fs::read_to_string(file).expect("a file");
            violations(file.strip_prefix(&src).expect("below src/"), &text)
        })
        .map(|violation| violation.to_string())
        .collect();
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

/// Returns each cycle of references between the files of `src/` as a list of modules. Ignores a
/// file's references to its parent modules. `texts` contains the module and the source code of each
/// file.
fn cycles(texts: &[(Vec<String>, String)]) -> Vec<String> {
    let file_of = |path: &[String]| {
        let ends = (1..=path.len()).rev();
        ends.filter_map(|end| texts.iter().position(|(module, _)| *module == path[..end]))
            .next()
    };
    let mut reaches: Vec<BTreeSet<usize>> = texts
        .iter()
        .map(|(module, text)| {
            let named = references(text, module).internal;
            let named = named.iter().filter_map(|it| file_of(&it.path));
            named
                .filter(|&file| !module.starts_with(&texts[file].0))
                .collect()
        })
        .collect();
    for intermediate in 0..texts.len() {
        let reached = reaches[intermediate].clone();
        for reachable in &mut reaches {
            if reachable.contains(&intermediate) {
                reachable.extend(&reached);
            }
        }
    }
    let cycle_of = |file: usize| -> Vec<usize> {
        let back = |other: &usize| reaches[file].contains(other) && reaches[*other].contains(&file);
        (0..texts.len()).filter(back).collect()
    };
    let found: BTreeSet<_> = (0..texts.len()).map(cycle_of).collect();
    let joined = |cycle: &Vec<usize>| {
        let files: Vec<_> = cycle.iter().map(|&file| texts[file].0.join("::")).collect();
        files.join(", ")
    };
    let found = found.iter().filter(|cycle| cycle.len() > 1);
    found.map(joined).collect()
}

#[test]
fn source_files_have_no_reference_cycles() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    let texts: Vec<_> = found
        .iter()
        .map(|file| {
            let module = module(file.strip_prefix(&src).expect("below src/"));
            (module, fs::read_to_string(file).expect("a file"))
        })
        .collect();
    let cycles = cycles(&texts);
    assert!(cycles.is_empty(), "{}", cycles.join("\n"));
}

#[test]
fn detects_direct_and_indirect_reference_cycles() {
    let text = |module: &str, text: &str| {
        let module = module.split("::").map(str::to_owned).collect();
        (module, text.to_owned())
    };
    let [a, b, c] = [
        text("a", "mod b; use self::b::B; use crate::c::C;"),
        text("a::b", "pub struct B; mod tests { use super::*; }"),
        text("c", "fn f() {}"),
    ];
    assert_eq!(cycles(&[a.clone(), b.clone(), c]), [""; 0]);
    let part = text("a::b", "use super::A;");
    assert_eq!(cycles(&[a.clone(), part]), [""; 0]);
    let [left, right] = [
        text("a::l", "use super::r::R;"),
        text("a::r", "fn f(l: super::l::L) {}"),
    ];
    assert_eq!(cycles(&[a.clone(), left, right]), ["a::l, a::r"]);
    let round = text("c", "fn f() { crate::d::g() }");
    let closed = text("d", "use crate::a::A;");
    assert_eq!(cycles(&[a, b, round, closed]), ["a, c, d"]);
}

#[test]
fn every_listed_top_level_module_exists_and_is_listed_once() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let top_modules = RANKS.concat();
    for top_module in &top_modules {
        assert!(
            src.join(format!("{top_module}.rs")).exists(),
            "{top_module}"
        );
        let count = top_modules
            .iter()
            .filter(|other| *other == top_module)
            .count();
        assert_eq!(count, 1, "{top_module}");
    }
}

/// Returns the paths that the source code `text` of the given module refers to.
fn paths(module: &str, text: &str) -> Vec<String> {
    let module: Vec<_> = module.split("::").map(str::to_owned).collect();
    let internal = references(text, &module).internal;
    internal
        .into_iter()
        .map(|named| named.path.join("::"))
        .collect()
}

#[test]
fn resolves_grouped_glob_and_aliased_imports() {
    assert_eq!(
        paths("a::b", "use crate::x::{self, y::{z as w, *}, super_ish};"),
        ["x::self", "x::y::z", "x::y", "x::super_ish"]
    );
    assert_eq!(paths("a::b", "use crate::{x, y::z};"), ["x", "y::z"]);
}

#[test]
fn resolves_super_and_self_relative_to_their_module() {
    assert_eq!(
        paths(
            "a::b",
            "use super::c; use super::super::d::E; use self::f::G;"
        ),
        ["a::c", "d::E", "a::b::f::G"]
    );
    assert_eq!(
        paths(
            "a::b",
            "#[cfg(test)] mod tests { use super::*; use super::super::super::d::E; mod inner { use super::x; } }"
        ),
        ["a::b", "d::E", "a::b::tests::x"]
    );
}

#[test]
fn finds_module_paths_in_function_bodies_types_macros_and_attributes() {
    assert_eq!(
        paths(
            "a",
            "fn f(x: &crate::b::C) -> Vec<crate::d::E> { crate::g::h::<crate::i::J>(super::k::L) }"
        ),
        ["b::C", "d::E", "g::h", "i::J", "k::L"]
    );
    assert_eq!(
        paths(
            "a",
            "macro_rules! m { () => { $crate::b::c() }; } m!(crate::d::E, [super::f::G]);"
        ),
        ["b::c", "d::E", "f::G"]
    );
    assert_eq!(
        paths(
            "a::b",
            "pub(in crate::a) fn f(&self) { self.g(); } pub(crate) struct S; pub(super) enum E {}"
        ),
        ["a"]
    );
    assert_eq!(
        paths(
            "a",
            "/// [`crate::b::C`]\nfn f() { say(\"crate::d\"); impl_for::<Self>(Self::new()); }"
        ),
        [""; 0]
    );
}

#[test]
fn reports_references_to_modules_in_the_same_or_a_higher_layer_with_file_and_line() {
    let check = |file: &str, text: &str| -> Vec<_> {
        let found = violations(Path::new(file), text);
        found.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        check("model/lsn.rs", "\nfn f() { crate::outbox::g() }"),
        [
            "src/model/lsn.rs:2: model refers to outbox, a higher module: outbox::g. model may refer to authorities, file_error, program, progress, trusted_path, escape"
        ]
    );
    let sideways = check("kafka.rs", "use crate::{model::A, postgres::B};");
    assert_eq!(sideways.len(), 1, "{sideways:?}");
    assert!(sideways[0].contains("kafka refers to postgres, a module of the same rank"));
    let up = check(
        "outbox/a.rs",
        "#[cfg(test)] mod tests { use super::super::super::sink::S; }",
    );
    assert!(
        up[0].contains("outbox refers to sink, a higher module"),
        "{up:?}"
    );
    let nowhere = check("sink.rs", "use crate::nothing::N; use super::*;");
    assert!(
        nowhere[0].contains("refers to nothing, which is not a top-level module"),
        "{nowhere:?}"
    );
    assert!(
        nowhere[1].contains("refers to the crate's root"),
        "{nowhere:?}"
    );
    assert!(check("attic.rs", "")[0].contains("module attic has no rank"));
    assert_eq!(
        check(
            "cli/run.rs",
            "use crate::model::A; use super::args; use self::b;"
        ),
        [""; 0]
    );
}

#[test]
fn reports_uses_of_a_crate_outside_the_module_that_wraps_it() {
    let check = |file: &str, text: &str| violations(Path::new(file), text).len();
    for text in [
        "use rdkafka::Message;",
        "use rdkafka as r;",
        "use ::rdkafka::Message;",
        "fn f(error: &rdkafka::error::KafkaError) {}",
        "m!(x, ::rdkafka::f());",
    ] {
        assert_eq!(check("pipeline.rs", text), 1, "{text}");
        assert_eq!(check("kafka/reader.rs", text), 0, "{text}");
    }
    let fields =
        "struct S { rdkafka: u8 } fn f(s: S) -> u8 { s.rdkafka } mod x { fn rdkafka() {} }";
    assert_eq!(check("pipeline.rs", fields), 0);
}

/// Subcommands that messages may instruct operators to run.
const SUBCOMMANDS: &[&str] = &[
    "check",
    "checkpoint",
    "init",
    "maintain",
    "pipeline",
    "replay",
    "run",
    "skip",
    "status",
    "verify",
];

/// Collects the string literals and their line numbers, except for literals in documentation and
/// tests.
fn literals(tokens: TokenStream, found: &mut Vec<(usize, String)>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        at += 1;
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let Some(TokenTree::Group(attribute)) = tokens.get(at) else {
                    continue;
                };
                match attribute.stream().to_string().replace(' ', "").as_str() {
                    text if text.starts_with("doc=") => at += 1,
                    "cfg(test)" => {
                        let is_body = |token: &TokenTree| {
                            matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
                                || matches!(token, TokenTree::Punct(punct) if punct.as_char() == ';')
                        };
                        let end = tokens[at..].iter().position(is_body);
                        at += end.map_or(0, |end| end + 1);
                    }
                    _ => {}
                }
            }
            TokenTree::Group(group) => literals(group.stream(), found),
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                if text.starts_with('"') {
                    let mut lines = text.split("\\\n");
                    let first = lines.next().unwrap_or_default().to_owned();
                    let text = lines.fold(first, |text, line| text + line.trim_start());
                    found.push((literal.span().start().line, text));
                }
            }
            _ => {}
        }
    }
}

/// Returns whether the text instructs the operator to run a Walpost command but omits the options
/// that select a configuration. A command after a colon or with a flag is meant to be run, whereas
/// `walpost run` within a sentence is only a name.
fn suggests_bare_command(text: &str) -> bool {
    if ["--config", "--http"]
        .iter()
        .any(|flag| text.contains(flag))
    {
        return false;
    }
    text.match_indices("walpost ").any(|(at, name)| {
        let rest = &text[at + name.len()..];
        let is_command = SUBCOMMANDS.iter().any(|word| {
            rest.strip_prefix(word)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
        });
        let second = rest.split_whitespace().nth(1).unwrap_or_default();
        let is_suggested = text[..at].ends_with(": ")
            || second.starts_with("--")
            || ["adopt", "show"].contains(&second);
        is_command && is_suggested
    })
}

#[test]
fn messages_contain_commands_with_their_required_options() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&src, &mut found);
    let mut bare = Vec::new();
    for file in found {
        let name = file.strip_prefix(&src).expect("below src/");
        if name
            .iter()
            .any(|part| part == "tests" || part == "tests.rs")
        {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a file");
        let mut texts = Vec::new();
        literals(
            TokenStream::from_str(&text).expect("a Rust file"),
            &mut texts,
        );
        let texts = texts
            .into_iter()
            .filter(|(_, text)| suggests_bare_command(text));
        bare.extend(texts.map(|(line, text)| format!("src/{}:{line}: {text}", name.display())));
    }
    assert!(
        bare.is_empty(),
        "generate these commands with model::commands, so that they work when pasted:\n{}",
        bare.join("\n")
    );
}

#[test]
fn distinguishes_suggested_commands_from_mentions_of_command_names() {
    for text in [
        "leave it out: walpost skip --to {at}",
        "Create it: walpost init",
        "To accept it run walpost checkpoint adopt",
        "Run walpost replay --set-aside again",
    ] {
        assert!(suggests_bare_command(text), "{text}");
    }
    for text in [
        "the slot that walpost run reads",
        "walpost init creates it",
        "     walpost check --config walpost.toml",
        "leave it out: {skip}",
    ] {
        assert!(!suggests_bare_command(text), "{text}");
    }
    let text = "/// a: walpost skip --to\nconst A: &str = \"x\"; #[cfg(test)] mod t { const B: &str = \"y\"; }";
    let mut found = Vec::new();
    literals(TokenStream::from_str(text).expect("tokens"), &mut found);
    let found: Vec<_> = found.into_iter().map(|(_, text)| text).collect();
    assert_eq!(found, ["\"x\""]);
}
