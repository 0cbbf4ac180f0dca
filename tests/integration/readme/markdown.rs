//! Extracts examples, tables, headings and links from README.md, the pages in docs/ and the other
//! documents. The files are read at run time, so that editing the documentation does not require a
//! rebuild.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A document.
pub(super) struct Page {
    /// The path relative to the repository's root, such as `README.md` or `docs/deploy.md`.
    pub(super) path: String,
    pub(super) text: String,
}

/// A fenced block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The nearest heading above the block.
    pub(super) heading: String,
    pub(super) language: String,
    pub(super) text: String,
}

/// The examples in one language under one heading of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Example {
    pub(super) page: &'static str,
    pub(super) heading: &'static str,
    pub(super) language: &'static str,
}

/// A line of a page, with the nearest heading above it.
struct PageLine<'t> {
    heading: &'t str,
    text: &'t str,
    is_fenced: bool,
}

/// Returns the full path of a file in the repository.
pub(super) fn in_repository(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Reads all Markdown files in a folder.
fn read_folder(folder: &str) -> Vec<Page> {
    let names = fs::read_dir(in_repository(folder)).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut pages: Vec<_> = names
        .filter(|name| name.ends_with(".md"))
        .map(|name| {
            let path = format!("{folder}{name}");
            let text = fs::read_to_string(in_repository(&path)).unwrap();
            Page { path, text }
        })
        .collect();
    pages.sort_by(|a, b| a.path.cmp(&b.path));
    pages
}

/// Returns every document in the repository, in no particular order.
pub(super) fn documents() -> &'static [Page] {
    static DOCUMENTS: LazyLock<Vec<Page>> = LazyLock::new(|| {
        let mut pages = read_folder("");
        pages.extend(read_folder("docs/"));
        pages
    });
    &DOCUMENTS
}

/// Returns the documents for users of Walpost: README.md and the pages in docs/.
pub(super) fn manual() -> impl Iterator<Item = &'static Page> {
    documents()
        .iter()
        .filter(|page| page.path == "README.md" || page.path.starts_with("docs/"))
}

pub(super) fn page(path: &str) -> &'static Page {
    let found = documents().iter().find(|page| page.path == path);
    found.unwrap_or_else(|| panic!("page {path} does not exist"))
}

impl Page {
    fn lines(&self) -> impl Iterator<Item = PageLine<'_>> {
        let (mut heading, mut is_fenced) = ("", false);
        self.text.lines().map(move |text| {
            // Fences within a list are indented.
            let is_fence = text.trim_start().starts_with("```");
            if is_fence {
                is_fenced = !is_fenced;
            } else if !is_fenced && text.starts_with('#') {
                heading = text.trim_start_matches('#').trim();
            }
            PageLine {
                heading,
                text,
                is_fenced: is_fenced || is_fence,
            }
        })
    }

    /// Returns every fenced block, in order.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_open = false;
        for line in self.lines().filter(|line| line.is_fenced) {
            match line.text.trim_start().strip_prefix("```") {
                Some(_) if is_open => is_open = false,
                Some(language) => {
                    is_open = true;
                    blocks.push(Block {
                        heading: line.heading.to_owned(),
                        language: language.to_owned(),
                        text: String::new(),
                    });
                }
                None => {
                    let block = blocks.last_mut().unwrap();
                    block.text.push_str(line.text);
                    block.text.push('\n');
                }
            }
        }
        blocks
    }

    /// Returns the table rows under a heading, without header rows. Each row is a list of cells. A
    /// cell is represented by its code spans or, if it contains none, by its whole text.
    pub(super) fn tables(&self, heading: &str) -> Vec<Vec<Vec<String>>> {
        let mut rows = Vec::new();
        let under = |line: &PageLine| line.heading == heading && !line.is_fenced;
        for line in self.lines().filter(under) {
            if line.text.starts_with("|---") {
                rows.pop();
            } else if line.text.starts_with('|') {
                rows.push(line.text);
            }
        }
        let path = &self.path;
        assert!(!rows.is_empty(), "{path} has no table under {heading:?}");
        let cells = |row: &&str| {
            row.trim_matches('|')
                .split('|')
                .map(|text| cell(text.trim()))
                .collect()
        };
        rows.iter().map(cells).collect()
    }

    /// Returns the anchors that GitHub generates for the page's headings.
    pub(super) fn anchors(&self) -> Vec<String> {
        let heading = |line: &PageLine| line.text.starts_with('#') && !line.is_fenced;
        self.lines()
            .filter(heading)
            .map(|line| {
                let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
                let text: String = line.heading.to_lowercase().chars().filter(kept).collect();
                text.replace(' ', "-")
            })
            .collect()
    }

    /// Returns the targets of all links, exactly as written on the page.
    pub(super) fn links(&self) -> impl Iterator<Item = &str> {
        let behind = self.text.split("](").skip(1);
        behind.filter_map(|rest| Some(rest.split_once(')')?.0))
    }
}

impl Example {
    pub(super) fn has(&self, page: &Page, block: &Block) -> bool {
        self.page == page.path && self.heading == block.heading && self.language == block.language
    }

    /// Returns the text of every matching example, in order.
    pub(super) fn all(&self) -> Vec<String> {
        let page = page(self.page);
        let found = page.blocks().into_iter();
        let found: Vec<_> = found
            .filter(|block| self.has(page, block))
            .map(|block| block.text)
            .collect();
        assert!(!found.is_empty(), "the example does not exist: {self:?}");
        found
    }

    /// Returns the text of the example, which must be the only match.
    pub(super) fn one(&self) -> String {
        let mut found = self.all();
        assert_eq!(found.len(), 1, "{self:?}");
        found.remove(0)
    }
}

fn cell(text: &str) -> Vec<String> {
    match in_backticks(text) {
        none if none.is_empty() => vec![text.to_owned()],
        some => some,
    }
}

/// Returns all text in single backticks, in order.
pub(super) fn in_backticks(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}
