//! Formats Markdown tables that are also readable as plain text.

use std::fmt::{self, Display};

/// A table whose first column is left-aligned and whose other columns are right-aligned.
pub(crate) struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<const COLUMNS: usize>(header: [&'static str; COLUMNS]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<_> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.header.len(), "{cells:?}");
        self.rows.push(cells);
    }

    fn width(&self, column: usize) -> usize {
        let cells = self.rows.iter().map(|row| row[column].chars().count());
        cells
            .chain([self.header[column].chars().count(), 3])
            .max()
            .unwrap_or(3)
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<_> = (0..self.header.len())
            .map(|column| self.width(column))
            .collect();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            for (column, (cell, &width)) in cells.zip(&widths).enumerate() {
                match column {
                    0 => write!(f, "| {cell:<width$} |")?,
                    _ => write!(f, " {cell:>width$} |")?,
                }
            }
            writeln!(f)
        };
        line(&mut self.header.iter().copied())?;
        let rules: Vec<_> = widths
            .iter()
            .enumerate()
            .map(|(column, &width)| match column {
                0 => "-".repeat(width),
                _ => format!("{}:", "-".repeat(width - 1)),
            })
            .collect();
        line(&mut rules.iter().map(String::as_str))?;
        for row in &self.rows {
            line(&mut row.iter().map(String::as_str))?;
        }
        Ok(())
    }
}
