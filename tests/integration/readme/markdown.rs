//! README.md taken apart: examples, tables, headings, links.

/// The text.
pub(super) const README: &str = include_str!("../../../README.md");

/// A fenced block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// The heading it stands under.
    pub(super) heading: String,
    pub(super) language: String,
    pub(super) text: String,
}

/// A line with the heading it stands under.
struct Line {
    heading: String,
    text: &'static str,
    is_fenced: bool,
}

fn lines() -> impl Iterator<Item = Line> {
    let (mut heading, mut is_fenced) = (String::new(), false);
    README.lines().map(move |text| {
        if text.starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced && text.starts_with('#') {
            text.trim_start_matches('#').trim().clone_into(&mut heading);
        }
        Line {
            heading: heading.clone(),
            text,
            is_fenced: is_fenced || text.starts_with("```"),
        }
    })
}

/// Every fenced block, in order.
pub(super) fn blocks() -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut is_open = false;
    for line in lines().filter(|line| line.is_fenced) {
        match line.text.strip_prefix("```") {
            Some(_) if is_open => is_open = false,
            Some(language) => {
                is_open = true;
                let (language, text) = (language.to_owned(), String::new());
                blocks.push(Block {
                    heading: line.heading,
                    language,
                    text,
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

/// The blocks in one language under one heading.
pub(super) fn examples(heading: &str, language: &str) -> Vec<String> {
    let found: Vec<_> = blocks()
        .into_iter()
        .filter(|block| block.heading == heading && block.language == language)
        .map(|block| block.text)
        .collect();
    assert!(
        !found.is_empty(),
        "README.md has no {language} example under {heading:?}"
    );
    found
}

/// The cells of the tables under a heading, without the rows of headings. Each cell is the list of
/// what stands in backticks; a cell without any is its text.
pub(super) fn tables(heading: &str) -> Vec<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    let mut previous: Option<&str> = None;
    for line in lines().filter(|line| line.heading == heading && !line.is_fenced) {
        if line.text.starts_with("|---") {
            rows.pop();
        } else if line.text.starts_with('|') {
            rows.push(line.text);
        }
        previous = Some(line.text);
    }
    assert!(
        previous.is_some() && !rows.is_empty(),
        "README.md has no table under {heading:?}"
    );
    let cells = |row: &&str| {
        row.trim_matches('|')
            .split('|')
            .map(|text| cell(text.trim()))
            .collect()
    };
    rows.iter().map(cells).collect()
}

fn cell(text: &str) -> Vec<String> {
    match in_backticks(text) {
        none if none.is_empty() => vec![text.to_owned()],
        some => some,
    }
}

/// What stands in single backticks, in order.
pub(super) fn in_backticks(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// The headings, as the anchors that GitHub makes of them.
pub(super) fn anchors() -> Vec<String> {
    let heading = |line: &Line| line.text.starts_with('#') && !line.is_fenced;
    lines()
        .filter(heading)
        .map(|line| {
            let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
            let text: String = line.heading.to_lowercase().chars().filter(kept).collect();
            text.replace(' ', "-")
        })
        .collect()
}

/// Where the links lead.
pub(super) fn links() -> Vec<&'static str> {
    README
        .split("](")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(')')?.0))
        .collect()
}
